//! What processes say that they did, in one file: the order of its lines is an order of causes and effects.

use std::fmt::{Debug, Write as _};
use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;

/// A subscriber that appends every event of a target to a file that other processes append to as well.
#[derive(Debug)]
pub struct Steps {
    target: &'static str,
    fields: &'static [&'static str],
    file: File,
}

impl Steps {
    /// Of a target's events these fields, a line each.
    ///
    /// # Errors
    ///
    /// Where the file cannot be opened.
    pub fn to(
        path: impl AsRef<Path>,
        target: &'static str,
        fields: &'static [&'static str],
    ) -> io::Result<Self> {
        let file = File::options().create(true).append(true).open(path)?;
        Ok(Self { target, fields, file })
    }
}

/// The fields' values, in an order that is asked for.
struct Values<'a> {
    fields: &'a [&'static str],
    values: Vec<String>,
}

impl tracing::field::Visit for Values<'_> {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn Debug) {
        if let Some(at) = self.fields.iter().position(|name| *name == field.name()) {
            let mut text = String::new();
            let _ = write!(text, "{value:?}");
            self.values[at] = text.trim_matches('"').to_owned();
        }
    }
}

impl tracing::Subscriber for Steps {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == self.target
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut found =
            Values { fields: self.fields, values: vec!["-".to_owned(); self.fields.len()] };
        event.record(&mut found);
        // One write: a process that is killed leaves a whole line or none.
        let line = found.values.join(" ") + "\n";
        let _ = (&self.file).write_all(line.as_bytes());
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}
