//! Objects of registered types, taken apart.

use crate::limits;
use crate::reason::{Reason, Refusal};
use crate::value::Value;

/// An object of a registered type, taken apart: whose it is, a schema of plain data, and parts.
///
/// It is put together on request, by a registry that knows its tag; one that does not know it holds it
/// as it is, and forwards it unopened. It keeps its parts alive itself, so it outlives its producer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Object {
    tag: String,
    version: u32,
    schema: Value,
    parts: Vec<Value>,
}

impl Object {
    /// From its parts.
    ///
    /// # Errors
    ///
    /// [`Reason::BadMetadata`] for an empty tag, [`Reason::OverCap`] for one over 256 bytes or more than
    /// 65,536 parts.
    pub fn new(
        tag: impl Into<String>,
        version: u32,
        schema: Value,
        parts: Vec<Value>,
    ) -> Result<Self, Refusal> {
        let tag = tag.into();
        if tag.is_empty() {
            return Err(Refusal::new(Reason::BadMetadata, "an object without a tag"));
        }
        if tag.len() > limits::OBJECT_TAG || parts.len() > limits::OBJECT_PARTS {
            let detail = format!("a tag of {} bytes, {} parts", tag.len(), parts.len());
            return Err(Refusal::new(Reason::OverCap, detail));
        }
        Ok(Self { tag, version, schema, parts })
    }

    /// The identity of the type.
    #[must_use]
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// The version of the type that took it apart.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// What is plain about it.
    #[must_use]
    pub fn schema(&self) -> &Value {
        &self.schema
    }

    /// Tensors, arrays, and objects of other types.
    #[must_use]
    pub fn parts(&self) -> &[Value] {
        &self.parts
    }

    /// The schema and the parts.
    #[must_use]
    pub fn into_parts(self) -> (Value, Vec<Value>) {
        (self.schema, self.parts)
    }
}
