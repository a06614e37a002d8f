//! NumPy's element types, as its `descr` says them.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::ser::{SerializeSeq, SerializeTuple, Serializer};
use serde::{Deserialize, Serialize};

use crate::dtype::DType;
use crate::limits;
use crate::reason::{Reason, Refusal};

/// The byte order of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ByteOrder {
    /// `<`.
    Little,
    /// `>`.
    Big,
    /// `|`: there is none to speak of.
    None,
}

/// What a scalar is: the letter of NumPy's array interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// `b`: a byte, 0 or 1.
    Bool,
    /// `i`.
    Int,
    /// `u`.
    Uint,
    /// `f`.
    Float,
    /// `c`: two floats.
    Complex,
    /// `M`: a point in time, counted in a unit; the least integer is no time (NaT).
    DateTime,
    /// `m`: a span of time.
    TimeDelta,
    /// `S`: bytes, padded with zeros.
    Bytes,
    /// `U`: UCS-4 characters, padded with zeros.
    Text,
    /// `V`: bytes of no type.
    Void,
}

const KINDS: [(char, Kind); 10] = [
    ('b', Kind::Bool),
    ('i', Kind::Int),
    ('u', Kind::Uint),
    ('f', Kind::Float),
    ('c', Kind::Complex),
    ('M', Kind::DateTime),
    ('m', Kind::TimeDelta),
    ('S', Kind::Bytes),
    ('U', Kind::Text),
    ('V', Kind::Void),
];

/// The units of time that NumPy has.
const UNITS: [&str; 13] = ["Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"];

/// A unit of time: so many of what it is named for, as in `[25s]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TimeUnit {
    count: u32,
    base: &'static str,
}

impl TimeUnit {
    /// How many of the base are one.
    #[must_use]
    pub fn count(self) -> u32 {
        self.count
    }

    /// `Y`, `M`, `W`, `D`, `h`, `m`, `s`, `ms`, `us`, `ns`, `ps`, `fs` or `as`.
    #[must_use]
    pub fn base(self) -> &'static str {
        self.base
    }
}

/// One number, time or string.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Scalar {
    order: ByteOrder,
    kind: Kind,
    /// As in the name: bytes, but characters of text.
    size: usize,
    unit: Option<TimeUnit>,
}

impl Scalar {
    /// The byte order.
    #[must_use]
    pub fn order(self) -> ByteOrder {
        self.order
    }

    /// What it is.
    #[must_use]
    pub fn kind(self) -> Kind {
        self.kind
    }

    /// Bytes of one.
    #[must_use]
    pub fn size(self) -> usize {
        if self.kind == Kind::Text { 4 * self.size } else { self.size }
    }

    /// What a time is counted in; none is NumPy's generic unit.
    #[must_use]
    pub fn unit(self) -> Option<TimeUnit> {
        self.unit
    }
}

impl FromStr for Scalar {
    type Err = Refusal;

    fn from_str(name: &str) -> Result<Self, Refusal> {
        let unknown = || {
            let shown: String = name.chars().take(32).collect();
            Refusal::new(Reason::UnknownDType, format!("{shown:?}"))
        };
        let mut letters = name.chars();
        let order = match letters.next() {
            Some('<' | '=') => ByteOrder::Little,
            Some('>') => ByteOrder::Big,
            Some('|') => ByteOrder::None,
            _ => return Err(unknown()),
        };
        let letter = letters.next().ok_or_else(unknown)?;
        if letter == 'O' {
            return Err(Reason::ObjectDType.into());
        }
        let rest = letters.as_str();
        let kind = KINDS.iter().find(|(known, _)| *known == letter).ok_or_else(unknown)?.1;
        let (digits, unit) = match rest.split_once('[') {
            Some((digits, unit)) => (digits, Some(unit.strip_suffix(']').ok_or_else(unknown)?)),
            None => (rest, None),
        };
        let size = number(digits).ok_or_else(unknown)?;
        let unit = match unit {
            Some(unit) if matches!(kind, Kind::DateTime | Kind::TimeDelta) => {
                Some(time_unit(unit).ok_or_else(unknown)?)
            }
            Some(_) => return Err(unknown()),
            None => None,
        };
        let known = match kind {
            Kind::Bool => size == 1,
            Kind::Int | Kind::Uint => matches!(size, 1 | 2 | 4 | 8),
            // 12 and 16 bytes are the C compiler's long double.
            Kind::Float => matches!(size, 2 | 4 | 8 | 12 | 16),
            Kind::Complex => matches!(size, 8 | 16 | 24 | 32),
            Kind::DateTime | Kind::TimeDelta => size == 8,
            Kind::Bytes | Kind::Text | Kind::Void => size <= 1 << 30,
        };
        if !known {
            return Err(unknown());
        }
        let single = size == 1 && kind != Kind::Text;
        // One way to write each: a byte has no order, and everything wider has one.
        let order = match (kind, order) {
            (Kind::Bytes | Kind::Void, _) => ByteOrder::None,
            _ if single => ByteOrder::None,
            (_, ByteOrder::None) => return Err(unknown()),
            (_, order) => order,
        };
        Ok(Self { order, kind, size, unit })
    }
}

/// A plain number: digits alone, no leading zeros.
fn number(digits: &str) -> Option<usize> {
    let plain = digits.bytes().all(|byte| byte.is_ascii_digit())
        && (digits.len() == 1 || !digits.starts_with('0'));
    digits.parse().ok().filter(|_| plain)
}

fn time_unit(text: &str) -> Option<TimeUnit> {
    let at = text.find(|c: char| !c.is_ascii_digit())?;
    let (count, base) = text.split_at(at);
    let count = if count.is_empty() { 1 } else { u32::try_from(number(count)?).ok()? };
    let base = UNITS.iter().find(|known| **known == base)?;
    (count > 0).then_some(TimeUnit { count, base })
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = match self.order {
            ByteOrder::Little => '<',
            ByteOrder::Big => '>',
            ByteOrder::None => '|',
        };
        let letter = KINDS.iter().find(|(_, kind)| *kind == self.kind).map_or('V', |(c, _)| *c);
        write!(f, "{order}{letter}{}", self.size)?;
        match self.unit {
            Some(TimeUnit { count: 1, base }) => write!(f, "[{base}]"),
            Some(TimeUnit { count, base }) => write!(f, "[{count}{base}]"),
            None => Ok(()),
        }
    }
}

/// A field of a record.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Field {
    /// Its name; empty for padding, which is void.
    pub name: String,
    /// Another name, for people.
    pub title: Option<String>,
    /// What one of it is.
    pub descr: Descr,
    /// The extents of a sub-array; none for a field that is one.
    pub shape: Vec<usize>,
}

impl Field {
    /// A field that is one of something.
    #[must_use]
    pub fn new(name: impl Into<String>, descr: Descr) -> Self {
        Self { name: name.into(), title: None, descr, shape: Vec::new() }
    }

    /// Bytes in a record.
    fn size(&self) -> Option<usize> {
        let size = self.descr.size();
        self.shape.iter().try_fold(size, |size, &extent| size.checked_mul(extent))
    }

    /// Whether it is bytes that nobody names.
    #[must_use]
    pub fn is_padding(&self) -> bool {
        self.name.is_empty()
    }
}

#[derive(Debug, PartialEq, Eq, Hash)]
enum Node {
    Scalar(Scalar),
    Record(Vec<Field>),
}

/// The type of an array's elements, as NumPy's `descr` says it: a scalar, or a record of named fields
/// that may be nested, or arrays themselves, with padding between them.
///
/// Its JSON form is that of `numpy.lib.format.dtype_to_descr`, with tuples as arrays: a string for a
/// scalar, an array of fields for a record, and a field `[name, type]` or `[name, type, [extents]]`,
/// whose name may be `[title, name]`. A record's members are arrays and a field begins with its name,
/// so no two types look alike.
///
/// ```
/// use rung::Descr;
///
/// let vertex: Descr = serde_json::from_str(r#"[["at","<f4",[3]],["","|V4"],["id",">i8"]]"#)?;
/// assert_eq!(vertex.size(), 24);
/// assert_eq!(vertex.field("id").unwrap().0, 16);
/// assert_eq!("<M8[25s]".parse::<Descr>()?.to_string(), "<M8[25s]");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Descr {
    node: Arc<Node>,
    size: usize,
}

impl Descr {
    /// A record of fields, one after the other.
    ///
    /// # Errors
    ///
    /// [`Reason::UnknownDType`] for a name that stands there twice, or none for what is not void;
    /// [`Reason::TooDeep`], [`Reason::OverCap`] and [`Reason::TooLarge`] for one past the caps.
    pub fn record(fields: Vec<Field>) -> Result<Self, Refusal> {
        let mut names = std::collections::HashSet::new();
        let mut size = 0usize;
        for field in &fields {
            let void = matches!(field.descr.scalar(), Some(scalar) if scalar.kind == Kind::Void);
            if field.is_padding() && !void {
                return Err(Refusal::new(Reason::UnknownDType, "a field without a name"));
            }
            let titles = field.title.iter().chain(Some(&field.name));
            for name in titles.filter(|name| !name.is_empty()) {
                if !names.insert(name.clone()) {
                    let detail = format!("the field {name:?} twice");
                    return Err(Refusal::new(Reason::UnknownDType, detail));
                }
            }
            if field.shape.len() > limits::RANK {
                let detail = format!("{} of the field {:?}", field.shape.len(), field.name);
                return Err(Refusal::new(Reason::Rank, detail));
            }
            size = field
                .size()
                .and_then(|field| size.checked_add(field))
                .filter(|&size| size <= isize::MAX as usize)
                .ok_or_else(|| Refusal::new(Reason::TooLarge, "a record's bytes"))?;
        }
        let record = Self { node: Arc::new(Node::Record(fields)), size };
        let (depth, count) = record.extent();
        if depth > limits::DESCR_DEPTH {
            let detail = format!("a record of {depth} levels, at most {}", limits::DESCR_DEPTH);
            return Err(Refusal::new(Reason::TooDeep, detail));
        }
        if count > limits::DESCR_FIELDS {
            let detail = format!("{count} fields, at most {}", limits::DESCR_FIELDS);
            return Err(Refusal::new(Reason::OverCap, detail));
        }
        Ok(record)
    }

    /// Levels, and fields on all of them.
    fn extent(&self) -> (usize, usize) {
        match &*self.node {
            Node::Scalar(_) => (0, 0),
            Node::Record(fields) => {
                let nested = fields.iter().map(|field| field.descr.extent());
                let (depth, count) = nested
                    .fold((0, fields.len()), |(d, c), (depth, count)| (d.max(depth), c + count));
                (depth + 1, count)
            }
        }
    }

    /// Bytes of one element.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// The scalar, if it is one.
    #[must_use]
    pub fn scalar(&self) -> Option<Scalar> {
        match &*self.node {
            Node::Scalar(scalar) => Some(*scalar),
            Node::Record(_) => None,
        }
    }

    /// The fields, if it is a record.
    #[must_use]
    pub fn fields(&self) -> Option<&[Field]> {
        match &*self.node {
            Node::Scalar(_) => None,
            Node::Record(fields) => Some(fields),
        }
    }

    /// A record's field and the byte it begins at, by its name or title.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<(usize, &Field)> {
        let mut at = 0;
        for field in self.fields()? {
            if !field.is_padding() && (field.name == name || field.title.as_deref() == Some(name)) {
                return Some((at, field));
            }
            at += field.size()?;
        }
        None
    }

    /// The dtype of a tensor with these elements, if there is one.
    #[must_use]
    pub fn dtype(&self) -> Option<DType> {
        let scalar = self.scalar()?;
        if scalar.order == ByteOrder::Big {
            return None;
        }
        Some(match (scalar.kind, scalar.size) {
            (Kind::Bool, 1) => DType::Bool,
            (Kind::Uint, 1) => DType::U8,
            (Kind::Uint, 2) => DType::U16,
            (Kind::Uint, 4) => DType::U32,
            (Kind::Uint, 8) => DType::U64,
            (Kind::Int, 1) => DType::I8,
            (Kind::Int, 2) => DType::I16,
            (Kind::Int, 4) => DType::I32,
            (Kind::Int, 8) => DType::I64,
            (Kind::Float, 2) => DType::F16,
            (Kind::Float, 4) => DType::F32,
            (Kind::Float, 8) => DType::F64,
            (Kind::Complex, 8) => DType::C64,
            (Kind::Complex, 16) => DType::C128,
            _ => return None,
        })
    }
}

impl TryFrom<DType> for Descr {
    type Error = Refusal;

    /// # Errors
    ///
    /// [`Reason::UnknownDType`] for what NumPy does not have: bfloat16 and 8-bit floats.
    fn try_from(dtype: DType) -> Result<Self, Refusal> {
        match dtype {
            DType::Bool => "|b1",
            DType::U8 => "|u1",
            DType::U16 => "<u2",
            DType::U32 => "<u4",
            DType::U64 => "<u8",
            DType::I8 => "|i1",
            DType::I16 => "<i2",
            DType::I32 => "<i4",
            DType::I64 => "<i8",
            DType::F16 => "<f2",
            DType::F32 => "<f4",
            DType::F64 => "<f8",
            DType::C64 => "<c8",
            DType::C128 => "<c16",
            other => {
                return Err(Refusal::new(Reason::UnknownDType, format!("NumPy has no {other}")));
            }
        }
        .parse()
    }
}

impl From<Scalar> for Descr {
    fn from(scalar: Scalar) -> Self {
        Self { size: scalar.size(), node: Arc::new(Node::Scalar(scalar)) }
    }
}

impl FromStr for Descr {
    type Err = Refusal;

    /// A scalar by its name, as `<f4`, `|S7`, `<U3` or `<M8[ns]`.
    ///
    /// # Errors
    ///
    /// [`Reason::UnknownDType`], and [`Reason::ObjectDType`] for `|O`.
    fn from_str(name: &str) -> Result<Self, Refusal> {
        name.parse::<Scalar>().map(Self::from)
    }
}

/// As Python writes it: what `numpy.dtype` takes.
impl fmt::Display for Descr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields = match &*self.node {
            Node::Scalar(scalar) => return scalar.fmt(f),
            Node::Record(fields) => fields,
        };
        f.write_str("[")?;
        for (index, field) in fields.iter().enumerate() {
            f.write_str(if index > 0 { ", (" } else { "(" })?;
            match &field.title {
                Some(title) => write!(f, "({}, {})", Quoted(title), Quoted(&field.name))?,
                None => Quoted(&field.name).fmt(f)?,
            }
            match field.descr.scalar() {
                Some(scalar) => write!(f, ", '{scalar}'")?,
                None => write!(f, ", {}", field.descr)?,
            }
            match field.shape.as_slice() {
                [] => {}
                [one] => write!(f, ", ({one},)")?,
                more => {
                    let extents: Vec<String> = more.iter().map(ToString::to_string).collect();
                    write!(f, ", ({})", extents.join(", "))?;
                }
            }
            f.write_str(")")?;
        }
        f.write_str("]")
    }
}

/// A string as a Python literal.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("'")?;
        for c in self.0.chars() {
            match c {
                '\\' | '\'' => write!(f, "\\{c}")?,
                c if c.is_control() => match u32::from(c) {
                    code @ 0..=0xff => write!(f, "\\x{code:02x}")?,
                    code => write!(f, "\\U{code:08x}")?,
                },
                c => write!(f, "{c}")?,
            }
        }
        f.write_str("'")
    }
}

impl Serialize for Descr {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &*self.node {
            Node::Scalar(scalar) => serializer.collect_str(scalar),
            Node::Record(fields) => {
                let mut seq = serializer.serialize_seq(Some(fields.len()))?;
                for field in fields {
                    seq.serialize_element(field)?;
                }
                seq.end()
            }
        }
    }
}

impl Serialize for Field {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut tuple = serializer.serialize_tuple(if self.shape.is_empty() { 2 } else { 3 })?;
        match &self.title {
            Some(title) => tuple.serialize_element(&[title, &self.name])?,
            None => tuple.serialize_element(&self.name)?,
        }
        tuple.serialize_element(&self.descr)?;
        if !self.shape.is_empty() {
            tuple.serialize_element(&self.shape)?;
        }
        tuple.end()
    }
}

impl<'de> Deserialize<'de> for Descr {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Descr;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a NumPy type")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<Descr, E> {
                name.parse().map_err(E::custom)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Descr, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = seq.next_element()? {
                    if fields.len() == limits::DESCR_FIELDS {
                        return Err(de::Error::custom("too many fields"));
                    }
                    fields.push(field);
                }
                Descr::record(fields).map_err(de::Error::custom)
            }
        }
        deserializer.deserialize_any(Read)
    }
}

impl<'de> Deserialize<'de> for Field {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Name {
            One(String),
            Two(String, String),
        }
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Field;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("[name, type] or [name, type, extents]")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Field, A::Error> {
                let short = |len| de::Error::invalid_length(len, &self);
                let name = seq.next_element()?.ok_or_else(|| short(0))?;
                let descr = seq.next_element()?.ok_or_else(|| short(1))?;
                let shape = seq.next_element::<Vec<usize>>()?;
                if seq.next_element::<de::IgnoredAny>()?.is_some() || shape == Some(Vec::new()) {
                    return Err(de::Error::custom(
                        "a field is [name, type] or [name, type, extents]",
                    ));
                }
                let (title, name) = match name {
                    Name::One(name) => (None, name),
                    Name::Two(title, name) => (Some(title), name),
                };
                Ok(Field { name, title, descr, shape: shape.unwrap_or_default() })
            }
        }
        deserializer.deserialize_seq(Read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Descr, serde_json::Error> {
        serde_json::from_str(json)
    }

    #[test]
    fn scalars_have_one_name() {
        for (name, size) in [
            ("|b1", 1),
            ("|i1", 1),
            (">i4", 4),
            ("<f2", 2),
            ("<f16", 16),
            ("<c32", 32),
            ("<M8[ns]", 8),
            ("<M8", 8),
            (">m8[25us]", 8),
            ("|S0", 0),
            ("|S7", 7),
            ("<U3", 12),
            (">U1", 4),
            ("|V9", 9),
        ] {
            let descr: Descr = name.parse().unwrap();
            assert_eq!((descr.to_string().as_str(), descr.size()), (name, size));
            assert_eq!(read(&serde_json::to_string(&descr).unwrap()).unwrap(), descr);
        }
        for (name, one) in [("=f4", "<f4"), ("<i1", "|i1"), (">S3", "|S3"), ("<M8[1D]", "<M8[D]")] {
            assert_eq!(name.parse::<Descr>().unwrap().to_string(), one);
        }
        for bad in
            ["", "f4", "<", "<f", "<f3", "|f4", "<f04", "<q8", "<f4[ns]", "<M8[0s]", "<M8[x]"]
        {
            assert_eq!(bad.parse::<Descr>().unwrap_err().reason(), Reason::UnknownDType, "{bad}");
        }
        assert_eq!("|O".parse::<Descr>().unwrap_err().reason(), Reason::ObjectDType);
    }

    #[test]
    fn records_keep_names_titles_padding_and_sub_arrays() {
        let json = r#"[["a",[["b","<f8"],["c","<i2",[3]]]],["","|V2"],[["long","s"],"|S4",[2,1]]]"#;
        let descr = read(json).unwrap();
        assert_eq!(serde_json::to_string(&descr).unwrap(), json);
        assert_eq!(descr.size(), 14 + 2 + 8);
        assert_eq!(descr.field("long").unwrap().0, 16);
        assert_eq!(
            descr.to_string(),
            "[('a', [('b', '<f8'), ('c', '<i2', (3,))]), ('', '|V2'), (('long', 's'), '|S4', (2, 1))]"
        );
        assert!(descr.field("").is_none());
    }

    #[test]
    fn what_is_no_type_is_refused() {
        for bad in [
            "1",
            "[1]",
            r#"["a","<f4"]"#,
            r#"[["a"]]"#,
            r#"[["a","<f4",[]]]"#,
            r#"[["a","<f4",[-1]]]"#,
            r#"[["a","<f4",[1],2]]"#,
            r#"[["a","<f4"],["a","<f4"]]"#,
            r#"[["","<f4"]]"#,
            r#"[["a","|V9",[99999999999,99999999999]]]"#,
            r#"[["a","|O"]]"#,
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
        let nested = |levels: usize| {
            (0..levels).fold("\"<f4\"".to_owned(), |inner, _| format!("[[\"a\",{inner}]]"))
        };
        assert!(read(&nested(limits::DESCR_DEPTH)).is_ok());
        assert!(read(&nested(limits::DESCR_DEPTH + 1)).is_err());
        assert!(read(&nested(100_000)).is_err());
    }

    #[test]
    fn plain_types_are_dtypes() {
        for dtype in DType::ALL {
            if let Ok(descr) = Descr::try_from(*dtype) {
                assert_eq!(descr.dtype(), Some(*dtype));
                assert_eq!(descr.size(), dtype.size());
            }
        }
        for other in [">f4", "<M8[ns]", "|S4", "<f16"] {
            assert_eq!(other.parse::<Descr>().unwrap().dtype(), None);
        }
    }
}
