//! Types that are taken apart for the way, and put together where they are known.
//!
//! ```
//! use ladder::{Object, Registry, Tensor, Value};
//! use ladder::rung::Refusal;
//!
//! #[derive(Debug, PartialEq)]
//! struct Mesh {
//!     name: String,
//!     vertices: Tensor,
//! }
//!
//! let registry = Registry::builder()
//!     .register::<Mesh>(
//!         "example.org/mesh",
//!         1,
//!         |mesh, _| Ok((mesh.name.as_str().into(), vec![mesh.vertices.clone().into()])),
//!         |mut parts| Ok(Mesh { name: parts.schema_as()?, vertices: parts.next_as()? }),
//!     )?
//!     .build();
//!
//! let mesh = Mesh { name: "cube".into(), vertices: Tensor::from_vec(vec![0f32; 24], &[8, 3])? };
//! let value: Value = registry.decompose(&mesh)?.into();
//! // … sent, forwarded by processes that have never heard of meshes, received:
//! assert_eq!(registry.compose::<Mesh>(&value)?, mesh);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::any::{Any, TypeId, type_name};
use std::collections::HashMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;

use rung::{Object, Reason, Refusal, Value, limits};
use serde::de::DeserializeOwned;

/// A type as plain data, and the tensors, arrays and other objects that belong to it.
pub type Decomposed = (Value, Vec<Value>);

type Decompose = dyn Fn(&dyn Any, &Decomposer<'_>) -> Result<Decomposed, Refusal> + Send + Sync;
type Compose = dyn Fn(Parts<'_>) -> Result<Box<dyn Any>, Refusal> + Send + Sync;

struct Entry {
    tag: String,
    version: u32,
    reads: RangeInclusive<u32>,
    type_id: TypeId,
    type_name: &'static str,
    decompose: Box<Decompose>,
    compose: Box<Compose>,
}

/// The types that this process takes apart and puts together.
///
/// It does not change once it is built, so no lookup takes a lock; cloning it shares it. Whether a tag is
/// known matters when an [`Object`] is opened, and never on the way: a process that knows none forwards
/// them all.
#[derive(Clone, Default)]
pub struct Registry {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    entries: Vec<Entry>,
    by_type: HashMap<TypeId, usize>,
    by_tag: HashMap<String, usize>,
}

/// Types for a [`Registry`].
#[derive(Default)]
pub struct RegistryBuilder {
    inner: Inner,
}

/// Two registrations that exclude each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The tag is registered already.
    #[error("the tag {tag:?} is registered already, for {by}")]
    Tag {
        /// The tag.
        tag: String,
        /// The type that has it.
        by: &'static str,
    },
    /// The type is registered already.
    #[error("{name} is registered already, as {tag:?}")]
    Type {
        /// The type.
        name: &'static str,
        /// Its tag.
        tag: String,
    },
    /// The tag is empty, or longer than 256 bytes.
    #[error("a tag of {0} bytes, from 1 to {max}", max = limits::OBJECT_TAG)]
    Length(usize),
}

impl RegistryBuilder {
    /// Registers a type: its tag, which is its identity in every process; the version of what
    /// `decompose` makes; and how it is taken apart and put together.
    ///
    /// An object of any other version is refused, with both numbers; see
    /// [`Self::register_reading`].
    ///
    /// # Errors
    ///
    /// [`RegisterError`]: neither a tag nor a type is registered twice.
    pub fn register<T: Any>(
        self,
        tag: impl Into<String>,
        version: u32,
        decompose: impl Fn(&T, &Decomposer<'_>) -> Result<Decomposed, Refusal> + Send + Sync + 'static,
        compose: impl Fn(Parts<'_>) -> Result<T, Refusal> + Send + Sync + 'static,
    ) -> Result<Self, RegisterError> {
        self.register_reading(tag, version, version..=version, decompose, compose)
    }

    /// As [`Self::register`], for a type whose `compose` reads several versions:
    /// [`Parts::version`] is the object's, [`Parts::registered`] the one here.
    ///
    /// # Errors
    ///
    /// As [`Self::register`].
    pub fn register_reading<T: Any>(
        mut self,
        tag: impl Into<String>,
        version: u32,
        reads: RangeInclusive<u32>,
        decompose: impl Fn(&T, &Decomposer<'_>) -> Result<Decomposed, Refusal> + Send + Sync + 'static,
        compose: impl Fn(Parts<'_>) -> Result<T, Refusal> + Send + Sync + 'static,
    ) -> Result<Self, RegisterError> {
        let (tag, type_id, name) = (tag.into(), TypeId::of::<T>(), type_name::<T>());
        if tag.is_empty() || tag.len() > limits::OBJECT_TAG {
            return Err(RegisterError::Length(tag.len()));
        }
        let Inner { entries, by_type, by_tag } = &mut self.inner;
        if let Some(&known) = by_tag.get(&tag) {
            return Err(RegisterError::Tag { tag, by: entries[known].type_name });
        }
        if let Some(&known) = by_type.get(&type_id) {
            return Err(RegisterError::Type { name, tag: entries[known].tag.clone() });
        }
        by_type.insert(type_id, entries.len());
        by_tag.insert(tag.clone(), entries.len());
        entries.push(Entry {
            tag,
            version,
            reads,
            type_id,
            type_name: name,
            decompose: Box::new(move |any, decomposer| match any.downcast_ref() {
                Some(value) => decompose(value, decomposer),
                None => Err(Reason::UnknownType.into()),
            }),
            compose: Box::new(move |parts| Ok(Box::new(compose(parts)?))),
        });
        Ok(self)
    }

    /// No more types.
    #[must_use]
    pub fn build(self) -> Registry {
        Registry { inner: Arc::new(self.inner) }
    }
}

impl Registry {
    /// With no types yet.
    #[must_use]
    pub fn builder() -> RegistryBuilder {
        RegistryBuilder::default()
    }

    /// Takes a value of a registered type apart; its tensors share their memory.
    ///
    /// # Errors
    ///
    /// [`Reason::UnknownType`] for a type that is not registered, [`Reason::TooDeep`], and what its
    /// `decompose` answers.
    pub fn decompose<T: Any>(&self, value: &T) -> Result<Object, Refusal> {
        Decomposer { registry: self, depth: 0 }.decompose(value)
    }

    /// Puts an object together.
    ///
    /// # Errors
    ///
    /// [`Reason::UnknownTag`] where its tag is not registered here (the object can still be forwarded); [`Reason::UnknownType`] where the tag is another type's, or the value no
    /// object; [`Reason::Version`] with both versions; [`Reason::TooDeep`]; and what its `compose` answers.
    pub fn compose<T: Any>(&self, object: &Value) -> Result<T, Refusal> {
        self.compose_at(object, 0)
    }

    /// Whether objects of this tag can be put together here.
    #[must_use]
    pub fn knows(&self, tag: &str) -> bool {
        self.inner.by_tag.contains_key(tag)
    }

    fn compose_at<T: Any>(&self, value: &Value, depth: usize) -> Result<T, Refusal> {
        check(depth)?;
        let Value::Object(object) = value else {
            let detail = format!("a {} is no {}", value.kind(), type_name::<T>());
            return Err(Refusal::new(Reason::UnknownType, detail));
        };
        let known = self.inner.by_tag.get(object.tag()).and_then(|&at| self.inner.entries.get(at));
        let entry = known.ok_or_else(|| {
            Refusal::new(Reason::UnknownTag, format!("{:?} is not registered here", object.tag()))
        })?;
        if entry.type_id != TypeId::of::<T>() {
            let detail =
                format!("{:?} is {}, not {}", entry.tag, entry.type_name, type_name::<T>());
            return Err(Refusal::new(Reason::UnknownType, detail));
        }
        let version = object.version();
        if !entry.reads.contains(&version) {
            let detail = format!("{:?} of version {version}, here {}", entry.tag, entry.version);
            return Err(Refusal::new(Reason::Version, detail));
        }
        // Cheap where it matters: memory is shared, not copied.
        let (schema, parts) = Object::clone(object).into_parts();
        let parts = Parts {
            registry: self,
            tag: &entry.tag,
            version,
            registered: entry.version,
            schema: Some(schema),
            parts: parts.into_iter(),
            taken: 0,
            depth,
        };
        let made = (entry.compose)(parts)?;
        // Of the type that was just compared.
        made.downcast().map(|made| *made).map_err(|_| Reason::UnknownType.into())
    }
}

fn check(depth: usize) -> Result<(), Refusal> {
    // An object and what it holds are at least two levels of a value.
    if depth >= limits::VALUE_DEPTH / 2 {
        let detail = format!("objects in objects, at most {}", limits::VALUE_DEPTH / 2);
        return Err(Refusal::new(Reason::TooDeep, detail));
    }
    Ok(())
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut map = f.debug_map();
        for entry in &self.inner.entries {
            map.entry(&format_args!("{} {}", entry.tag, entry.version), &entry.type_name);
        }
        map.finish()
    }
}

impl fmt::Debug for RegistryBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.inner.entries.iter().map(|entry| &entry.tag)).finish()
    }
}

/// For a type that takes its own parts apart.
#[derive(Debug)]
pub struct Decomposer<'r> {
    registry: &'r Registry,
    depth: usize,
}

impl Decomposer<'_> {
    /// Takes a part of a registered type apart, one level deeper.
    ///
    /// # Errors
    ///
    /// As [`Registry::decompose`].
    pub fn decompose<T: Any>(&self, value: &T) -> Result<Object, Refusal> {
        check(self.depth)?;
        let inner = &self.registry.inner;
        let known = inner.by_type.get(&TypeId::of::<T>()).and_then(|&at| inner.entries.get(at));
        let entry = known.ok_or_else(|| {
            Refusal::new(Reason::UnknownType, format!("{} is not registered", type_name::<T>()))
        })?;
        let deeper = Decomposer { registry: self.registry, depth: self.depth + 1 };
        let (schema, parts) = (entry.decompose)(value, &deeper)?;
        Object::new(entry.tag.clone(), entry.version, schema, parts)
    }
}

/// What an object is put together from.
#[derive(Debug)]
pub struct Parts<'r> {
    registry: &'r Registry,
    tag: &'r str,
    version: u32,
    registered: u32,
    schema: Option<Value>,
    parts: std::vec::IntoIter<Value>,
    taken: usize,
    depth: usize,
}

impl Parts<'_> {
    /// The version of whoever took it apart.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The version that is registered here.
    #[must_use]
    pub fn registered(&self) -> u32 {
        self.registered
    }

    fn wrong(&self, what: &str) -> Refusal {
        Refusal::new(Reason::BadMetadata, format!("{what} of {:?}", self.tag))
    }

    /// The schema; once.
    ///
    /// # Errors
    ///
    /// [`Reason::BadMetadata`] the second time.
    pub fn schema(&mut self) -> Result<Value, Refusal> {
        self.schema.take().ok_or_else(|| self.wrong("the schema, again,"))
    }

    /// The schema as a type; once.
    ///
    /// # Errors
    ///
    /// [`Reason::BadMetadata`] where it is not that type's.
    pub fn schema_as<T: DeserializeOwned>(&mut self) -> Result<T, Refusal> {
        let schema = self.schema()?;
        rung::from_value(schema).map_err(|error| self.wrong(&format!("the schema, {error},")))
    }

    /// The next part.
    ///
    /// # Errors
    ///
    /// [`Reason::BadMetadata`] where there is none left.
    pub fn next_part(&mut self) -> Result<Value, Refusal> {
        self.taken += 1;
        let taken = self.taken;
        self.parts.next().ok_or_else(|| self.wrong(&format!("part {taken}, which is missing,")))
    }

    /// The next part as a tensor, an array, or any other type that `serde` reads.
    ///
    /// # Errors
    ///
    /// [`Reason::BadMetadata`] where there is none left, or it is not that type's.
    pub fn next_as<T: DeserializeOwned>(&mut self) -> Result<T, Refusal> {
        let part = self.next_part()?;
        let taken = self.taken;
        rung::from_value(part).map_err(|error| self.wrong(&format!("part {taken}, {error},")))
    }

    /// The next part as a registered type.
    ///
    /// # Errors
    ///
    /// As [`Registry::compose`].
    pub fn compose_next<T: Any>(&mut self) -> Result<T, Refusal> {
        let part = self.next_part()?;
        self.registry.compose_at(&part, self.depth + 1)
    }

    /// How many parts are left.
    #[must_use]
    pub fn left(&self) -> usize {
        self.parts.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rung::Tensor;

    #[derive(Debug, Clone, PartialEq)]
    struct Material {
        colour: [f32; 3],
        texture: Option<Tensor>,
        under: Option<Box<Material>>,
    }

    fn materials() -> RegistryBuilder {
        let taken = |material: &Material, decomposer: &Decomposer<'_>| {
            let has = (material.texture.is_some(), material.under.is_some());
            let schema = rung::to_value(&(material.colour, has));
            let schema =
                schema.map_err(|error| Refusal::new(Reason::BadMetadata, error.to_string()))?;
            let mut parts: Vec<Value> = material.texture.iter().cloned().map(Value::from).collect();
            if let Some(under) = &material.under {
                parts.push(decomposer.decompose(&**under)?.into());
            }
            Ok((schema, parts))
        };
        let composed = |mut parts: Parts<'_>| {
            let (colour, (texture, under)) = parts.schema_as::<([f32; 3], (bool, bool))>()?;
            let texture = if texture { Some(parts.next_as()?) } else { None };
            let under = if under { Some(Box::new(parts.compose_next()?)) } else { None };
            Ok(Material { colour, texture, under })
        };
        Registry::builder().register::<Material>("tests/material", 3, taken, composed).unwrap()
    }

    fn material(levels: usize) -> Material {
        let texture = Some(Tensor::from_vec(vec![levels as u8], &[1]).unwrap());
        let under = (levels > 1).then(|| Box::new(material(levels - 1)));
        Material { colour: [0.0, 0.5, 1.0], texture, under }
    }

    #[test]
    fn a_recursive_type_comes_back_within_bounds() {
        let registry = materials().build();
        let value: Value = registry.decompose(&material(5)).unwrap().into();
        assert_eq!(registry.compose::<Material>(&value).unwrap(), material(5));
        assert!(registry.knows("tests/material"));
        let most = limits::VALUE_DEPTH / 2;
        let deep = registry.decompose(&material(most)).unwrap();
        assert_eq!(registry.compose::<Material>(&deep.into()).unwrap(), material(most));
        let error = registry.decompose(&material(most + 1)).unwrap_err();
        assert_eq!(error.reason(), Reason::TooDeep);
        let deeper = registry.decompose(&material(most)).unwrap();
        let schema = deeper.schema().clone();
        let around = Object::new(
            "tests/material",
            3,
            schema,
            vec![Tensor::from_vec(vec![1u8], &[1]).unwrap().into(), deeper.into()],
        );
        let error = registry.compose::<Material>(&around.unwrap().into()).unwrap_err();
        assert_eq!(error.reason(), Reason::TooDeep);
    }

    #[test]
    fn nothing_is_registered_twice() {
        let twice = || |_: &u8, _: &Decomposer<'_>| Ok((Value::Null, vec![]));
        let error =
            materials().register::<u8>("tests/material", 1, twice(), |_| Ok(0)).unwrap_err();
        assert!(matches!(error, RegisterError::Tag { .. }), "{error}");
        let once = materials().register::<u8>("a", 1, twice(), |_| Ok(0)).unwrap();
        let error = once.register::<u8>("b", 1, twice(), |_| Ok(0)).unwrap_err();
        assert_eq!(error, RegisterError::Type { name: "u8", tag: "a".into() });
        let error = materials().register::<u8>("", 1, twice(), |_| Ok(0)).unwrap_err();
        assert_eq!(error, RegisterError::Length(0));
    }

    #[test]
    fn what_is_not_known_says_what() {
        let registry = materials().build();
        let object = registry.decompose(&material(1)).unwrap();
        let nothing = Registry::default();
        let refusal = nothing.compose::<Material>(&object.clone().into()).unwrap_err();
        assert_eq!(refusal.reason(), Reason::UnknownTag);
        assert_eq!(nothing.decompose(&1u8).unwrap_err().reason(), Reason::UnknownType);
        let refusal = registry.compose::<u8>(&object.clone().into()).unwrap_err();
        assert_eq!(refusal.reason(), Reason::UnknownType);
        let refusal = registry.compose::<Material>(&Value::Null).unwrap_err();
        assert_eq!(refusal.reason(), Reason::UnknownType);
        let (schema, parts) = object.clone().into_parts();
        let newer = Object::new("tests/material", 4, schema.clone(), parts).unwrap();
        let refusal = registry.compose::<Material>(&newer.into()).unwrap_err();
        assert_eq!(refusal.reason(), Reason::Version);
        assert_eq!(refusal.detail(), "\"tests/material\" of version 4, here 3");
        let short = Object::new("tests/material", 3, schema, vec![]).unwrap();
        let refusal = registry.compose::<Material>(&short.into()).unwrap_err();
        assert!(refusal.detail().contains("part 1, which is missing"), "{refusal}");
        let wrong = Object::new("tests/material", 3, Value::Null, vec![]).unwrap();
        let refusal = registry.compose::<Material>(&wrong.into()).unwrap_err();
        assert_eq!(refusal.reason(), Reason::BadMetadata);
    }
}
