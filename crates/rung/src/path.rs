//! Places in a value.

use std::fmt::{self, Write};

use crate::value::Value;

/// One step into a value.
#[derive(Debug, Clone, Copy)]
pub enum Step<'a> {
    /// Under a string key.
    Key(&'a str),
    /// At an index: of a list, a tuple, a set, or of a map's entries with other keys.
    Index(usize),
}

impl<'a> Step<'a> {
    /// To an entry of a map: by its key where that is a string, else by its position.
    #[must_use]
    pub fn of_entry(key: &'a Value, index: usize) -> Self {
        key.as_str().map_or(Self::Index(index), Self::Key)
    }
}

/// The place of a leaf in a value, as a chain of steps on the stack: printed as `$.images[3].meta`.
#[derive(Debug, Clone, Copy)]
pub struct Path<'a> {
    parent: Option<(&'a Path<'a>, Step<'a>)>,
}

impl<'a> Path<'a> {
    /// The value itself.
    pub const ROOT: Path<'static> = Path { parent: None };

    /// One step further.
    #[must_use]
    pub fn then(&'a self, step: Step<'a>) -> Self {
        Self { parent: Some((self, step)) }
    }
}

impl Path<'_> {
    /// Appends the path as it is printed: a message of many leaves names them all.
    pub fn push_to(&self, out: &mut String) {
        let Some((parent, step)) = self.parent else {
            return out.push('$');
        };
        parent.push_to(out);
        match step {
            Step::Index(index) => {
                // Writing to a String does not fail.
                let _ = write!(out, "[{index}]");
            }
            Step::Key(key) if is_plain(key) => {
                out.push('.');
                out.push_str(key);
            }
            Step::Key(key) => {
                let shown: String = key.chars().take(64).collect();
                let _ = write!(out, "[{shown:?}]");
            }
        }
    }

    /// The path as it is printed.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::with_capacity(24);
        self.push_to(&mut text);
        text
    }
}

fn is_plain(key: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    if key.is_empty() {
        return false;
    }
    if key.len() <= 64 && key.bytes().all(plain) {
        return true;
    }
    let plain = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
    key.chars().count() <= 64 && key.chars().all(plain)
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_read_like_paths() {
        let images = Path::ROOT.then(Step::Key("images"));
        let third = images.then(Step::Index(3));
        assert_eq!(third.then(Step::Key("meta")).to_string(), "$.images[3].meta");
        assert_eq!(third.then(Step::Key("a b")).to_string(), "$.images[3][\"a b\"]");
    }
}
