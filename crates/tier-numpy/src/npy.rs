//! `.npy` files (NumPy's NEP 1, versions 1 to 3), and `.npz` archives of them.
//!
//! ```
//! use rung::{Array, Tensor};
//!
//! let image = Tensor::from_vec(vec![1u16, 2, 3, 4], &[2, 2])?;
//! let mut file = Vec::new();
//! tier_numpy::npy::write(&Array::from_tensor(&image)?, &mut file)?;
//! assert_eq!(tier_numpy::npy::read(file)?.to_tensor()?, image);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(feature = "npz")]
use std::io::Read;
use std::io::{self, Write};

use bytes::Bytes;
use rung::{Array, DType, Descr, Field, Reason, Refusal, limits};

use crate::literal::{self, Literal};

/// What every `.npy` file begins with.
const MAGIC: &[u8; 6] = b"\x93NUMPY";

/// The data begin at a multiple of this, so that they can be mapped.
const ALIGN: usize = 64;

/// Why a file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NpyError {
    /// It is no `.npy` file, or a broken one.
    #[error("not a .npy file: {0}")]
    Malformed(String),
    /// Its type cannot be held, or its memory not be read.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The archive is broken.
    #[cfg(feature = "npz")]
    #[error("not a .npz archive")]
    Archive(#[from] zip::result::ZipError),
    /// Reading or writing failed.
    #[error("reading or writing failed")]
    Io(#[from] io::Error),
}

fn malformed(what: impl Into<String>) -> NpyError {
    NpyError::Malformed(what.into())
}

/// What a header says.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    /// The type of the elements.
    pub descr: Descr,
    /// Whether the first dimension is the fastest.
    pub fortran_order: bool,
    /// Elements in each dimension.
    pub shape: Vec<usize>,
}

impl Header {
    /// Reads a header, and says where the data begin.
    ///
    /// # Errors
    ///
    /// [`NpyError::Malformed`]; [`NpyError::Refused`] for a type that no [`Descr`] is, arrays of objects
    /// above all.
    pub fn parse(file: &[u8]) -> Result<(Self, usize), NpyError> {
        let rest = file.strip_prefix(MAGIC).ok_or_else(|| malformed("the magic is missing"))?;
        let (version, rest) =
            rest.split_first_chunk::<2>().ok_or_else(|| malformed("cut in the version"))?;
        let cut = || malformed("cut in the header");
        let (len, rest) = match version {
            [1, 0] => {
                let (len, rest) = rest.split_first_chunk::<2>().ok_or_else(cut)?;
                (usize::from(u16::from_le_bytes(*len)), rest)
            }
            [2 | 3, 0] => {
                let (len, rest) = rest.split_first_chunk::<4>().ok_or_else(cut)?;
                (u32::from_le_bytes(*len) as usize, rest)
            }
            [major, minor] => return Err(malformed(format!("version {major}.{minor}"))),
        };
        if len > limits::NPY_HEADER {
            return Err(malformed(format!("a header of {len} bytes")));
        }
        let (text, data) = rest.split_at_checked(len).ok_or_else(cut)?;
        let text = match version {
            [3, _] => String::from_utf8(text.to_vec()).map_err(|_| malformed("not UTF-8"))?,
            // Latin-1: every byte is its own character.
            _ => text.iter().map(|byte| char::from(*byte)).collect(),
        };
        let header = Self::from_literal(literal::parse(&text).map_err(malformed)?)?;
        Ok((header, file.len() - data.len()))
    }

    fn from_literal(literal: Literal) -> Result<Self, NpyError> {
        let Literal::Dict(entries) = literal else {
            return Err(malformed("the header is no dictionary"));
        };
        let (mut descr, mut order, mut shape) = (None, None, None);
        for (key, value) in entries {
            let Literal::Text(key) = key else { return Err(malformed("a key that is no string")) };
            let twice = match (key.as_str(), value) {
                ("descr", value) => descr.replace(to_descr(value)?).is_some(),
                ("fortran_order", Literal::Truth(truth)) => order.replace(truth).is_some(),
                ("shape", Literal::Tuple(extents)) => shape.replace(to_extents(extents)?).is_some(),
                (key, _) => return Err(malformed(format!("the header's {key:?}"))),
            };
            if twice {
                return Err(malformed(format!("{key:?} twice")));
            }
        }
        match (descr, order, shape) {
            (Some(descr), Some(fortran_order), Some(shape)) => {
                Ok(Self { descr, fortran_order, shape })
            }
            _ => Err(malformed("the header lacks descr, fortran_order or shape")),
        }
    }

    /// The header as a file begins with it: in the oldest version that has its letters.
    fn print(&self) -> Result<Vec<u8>, NpyError> {
        let extents = match self.shape.as_slice() {
            [one] => format!("({one},)"),
            more => {
                let extents: Vec<String> = more.iter().map(ToString::to_string).collect();
                format!("({})", extents.join(", "))
            }
        };
        let descr = match self.descr.scalar() {
            Some(scalar) => format!("'{scalar}'"),
            None => self.descr.to_string(),
        };
        let order = if self.fortran_order { "True" } else { "False" };
        let text = format!("{{'descr': {descr}, 'fortran_order': {order}, 'shape': {extents}, }}");
        let latin: Option<Vec<u8>> = text.chars().map(|c| u8::try_from(c).ok()).collect();
        let (major, text) = match latin {
            Some(latin) if latin.len() + ALIGN < usize::from(u16::MAX) => (1, latin),
            Some(latin) => (2, latin),
            None => (3, text.into_bytes()),
        };
        let before = if major == 1 { 10 } else { 12 };
        let len = (before + text.len() + 1).next_multiple_of(ALIGN) - before;
        if len > limits::NPY_HEADER {
            return Err(malformed(format!("a header of {len} bytes")));
        }
        let mut header = MAGIC.to_vec();
        header.extend([major, 0]);
        match u16::try_from(len) {
            Ok(len) if major == 1 => header.extend(len.to_le_bytes()),
            _ => header.extend(u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes()),
        }
        header.extend(text);
        header.resize(before + len - 1, b' ');
        header.push(b'\n');
        Ok(header)
    }
}

fn to_descr(literal: Literal) -> Result<Descr, NpyError> {
    match literal {
        Literal::Text(name) => Ok(name.parse::<Descr>()?),
        Literal::List(fields) => {
            let fields: Result<Vec<Field>, NpyError> = fields.into_iter().map(to_field).collect();
            Ok(Descr::record(fields?)?)
        }
        _ => Err(malformed("a type that is neither a string nor a list")),
    }
}

fn to_field(literal: Literal) -> Result<Field, NpyError> {
    let no_field = || malformed("a field that is no tuple of name, type and extents");
    let Literal::Tuple(parts) = literal else { return Err(no_field()) };
    let mut parts = parts.into_iter();
    let (name, descr, shape) = (parts.next(), parts.next(), parts.next());
    let (title, name) = match name {
        Some(Literal::Text(name)) => (None, name),
        Some(Literal::Tuple(names)) => match <[Literal; 2]>::try_from(names) {
            Ok([Literal::Text(title), Literal::Text(name)]) => (Some(title), name),
            _ => return Err(no_field()),
        },
        _ => return Err(no_field()),
    };
    let descr = to_descr(descr.ok_or_else(no_field)?)?;
    let shape = match shape {
        None => Vec::new(),
        Some(Literal::Tuple(extents)) => to_extents(extents)?,
        Some(Literal::Number(extent)) => to_extents(vec![Literal::Number(extent)])?,
        Some(_) => return Err(no_field()),
    };
    if parts.next().is_some() {
        return Err(no_field());
    }
    Ok(Field { name, title, descr, shape })
}

fn to_extents(literals: Vec<Literal>) -> Result<Vec<usize>, NpyError> {
    let extent = |literal| match literal {
        Literal::Number(number) => usize::try_from(number).ok(),
        _ => None,
    };
    let extents: Option<Vec<usize>> = literals.into_iter().map(extent).collect();
    extents.ok_or_else(|| malformed("an extent that is no number"))
}

/// Reads a file, whose memory the array shares: in Fortran order it is a view with other strides.
///
/// # Errors
///
/// As [`Header::parse`]; [`NpyError::Malformed`] where the data are longer or shorter than the shape;
/// [`NpyError::Refused`] for bools that are neither 0 nor 1.
pub fn read(file: impl Into<Bytes>) -> Result<Array, NpyError> {
    let file = file.into();
    let (Header { descr, fortran_order, shape }, start) = Header::parse(&file)?;
    let data = file.slice(start..);
    let have = data.len();
    let lies = |error: Refusal| match error.reason() {
        Reason::ShapeMismatch => {
            malformed(format!("{have} bytes of data, which is not shape {:?} of {descr}", shape))
        }
        _ => error.into(),
    };
    let array = if fortran_order {
        let reversed: Vec<usize> = shape.iter().rev().copied().collect();
        let order: Vec<usize> = (0..shape.len()).rev().collect();
        let array = Array::from_bytes(data, descr.clone(), &reversed).map_err(lies)?;
        array.permute(&order)?
    } else {
        Array::from_bytes(data, descr.clone(), &shape).map_err(lies)?
    };
    if descr.dtype() == Some(DType::Bool) {
        array.to_tensor()?.span_as_slice::<bool>()?;
    }
    Ok(array)
}

/// Writes an array as a file: in Fortran order where that is how it lies, else in C order.
///
/// # Errors
///
/// [`NpyError::Io`], [`NpyError::Refused`] where its memory cannot be read.
pub fn write(array: &Array, mut file: impl Write) -> Result<(), NpyError> {
    let order: Vec<usize> = (0..array.shape().len()).rev().collect();
    let turned = array.permute(&order)?;
    let fortran_order = !array.layout().is_contiguous() && turned.layout().is_contiguous();
    let shape = array.shape().to_vec();
    let header = Header { descr: array.descr().clone(), fortran_order, shape };
    file.write_all(&header.print()?)?;
    let mut outcome = Ok(());
    let written =
        (if fortran_order { &turned } else { array }).cells().for_each_piece(&mut |piece| {
            file.write_all(piece).map_err(|error| {
                outcome = Err(error);
                Reason::System.into()
            })
        });
    outcome?;
    written?;
    Ok(file.flush()?)
}

/// Reads every array of a `.npz` archive, by its name there without `.npy`: `most` bytes of all together, since
/// a short archive can become anything.
///
/// # Errors
///
/// [`NpyError::Archive`], [`NpyError::Malformed`] past `most`, and as [`read`].
#[cfg(feature = "npz")]
pub fn read_npz(
    archive: impl io::Read + io::Seek,
    most: u64,
) -> Result<Vec<(String, Array)>, NpyError> {
    let mut left = most;
    let mut archive = zip::ZipArchive::new(archive)?;
    let mut arrays = Vec::new();
    for index in 0..archive.len() {
        let entry = archive.by_index(index)?;
        let name = entry.name()?.to_string();
        let Some(name) = name.strip_suffix(".npy") else {
            return Err(malformed(format!("{name:?} in the archive")));
        };
        let name = name.to_owned();
        let mut file = Vec::new();
        // What the archive says of the size is not believed before the bytes are there.
        let read_so_far = io::copy(&mut entry.take(left.saturating_add(1)), &mut file)?;
        left = left
            .checked_sub(read_so_far)
            .ok_or_else(|| malformed(format!("over {most} bytes in the archive")))?;
        arrays.push((name, read(file)?));
    }
    Ok(arrays)
}

/// Writes arrays as a `.npz` archive, not compressed.
///
/// # Errors
///
/// [`NpyError::Archive`], and as [`write()`].
#[cfg(feature = "npz")]
pub fn write_npz<'a>(
    arrays: impl IntoIterator<Item = (&'a str, &'a Array)>,
    archive: impl io::Write + io::Seek,
) -> Result<(), NpyError> {
    let mut archive = zip::ZipWriter::new(archive);
    let options = zip::write::SimpleFileOptions::default()
        .compression_method(zip::CompressionMethod::Stored)
        .large_file(true);
    for (name, array) in arrays {
        archive.start_file(format!("{name}.npy"), options)?;
        write(array, &mut archive)?;
    }
    archive.finish()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rung::Tensor;

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        let mut file = MAGIC.to_vec();
        file.extend([1, 0]);
        file.extend(u16::try_from(header.len()).unwrap().to_le_bytes());
        file.extend(header.bytes());
        file.extend(data);
        file
    }

    #[test]
    fn records_of_all_kinds_come_back() {
        for descr in [
            r#""<M8[25us]""#,
            r#""|S0""#,
            r#"[["a",[["b","<f8"],["c","<i2",[3]]]],["","|V2"],[["long","s"],"|S4",[2,1]]]"#,
            r#"[["naïve","<f4"]]"#,
            r#"[["火箭","<f4"],["it's\\ \n","<f4"]]"#,
        ] {
            let descr: Descr = serde_json::from_str(descr).unwrap();
            let bytes: Vec<u8> = (0..3 * descr.size()).map(|at| at as u8).collect();
            let array = Array::from_bytes(bytes, descr, &[3]).unwrap();
            let mut file = Vec::new();
            write(&array, &mut file).unwrap();
            let (_, start) = Header::parse(&file).unwrap();
            assert_eq!(start % ALIGN, 0);
            assert_eq!(read(file).unwrap(), array);
        }
    }

    #[test]
    fn fortran_order_stays() {
        let tensor = Tensor::from_vec((0..6i32).collect::<Vec<_>>(), &[2, 3]).unwrap();
        let turned = Array::from_tensor(&tensor.permute(&[1, 0]).unwrap()).unwrap();
        let mut file = Vec::new();
        write(&turned, &mut file).unwrap();
        assert!(Header::parse(&file).unwrap().0.fortran_order);
        assert_eq!(read(file).unwrap(), turned);
    }

    #[test]
    fn what_is_no_file_says_why() {
        let plain = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }";
        assert!(read(file(plain, &[0; 8])).is_ok());
        for (bad, why) in [
            (vec![], "magic"),
            (file(plain, &[0; 8])[..20].to_vec(), "cut"),
            (file(plain, &[0; 7]), "7 bytes of data"),
            (file(plain, &[0; 9]), "9 bytes of data"),
            (file("{'descr': '<f4'}", &[]), "lacks"),
            (file("{'descr': '|O', 'fortran_order': False, 'shape': ()}", &[0; 8]), "objects"),
            (file("{'descr': '<f4', 'descr': '<f4'}", &[]), "twice"),
            (file("{'shape': [2]}", &[]), "shape"),
            (file("[]", &[]), "dictionary"),
            (file("{'descr': [('a',)]}", &[]), "type"),
            (file("{'descr': '|b1', 'fortran_order': False, 'shape': (1,)}", &[2]), "no value"),
            (
                file(
                    "{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999,9999999999)}",
                    &[],
                ),
                "reaches outside",
            ),
        ] {
            let error = read(bad).unwrap_err().to_string();
            assert!(error.contains(why), "{error} ({why})");
        }
        let mut huge = MAGIC.to_vec();
        huge.extend([2, 0, 255, 255, 255, 255]);
        assert!(read(huge).unwrap_err().to_string().contains("4294967295"));
    }

    #[cfg(feature = "npz")]
    #[test]
    fn an_archive_comes_back() {
        let one = Array::from_bytes(vec![1, 2], "|S1".parse().unwrap(), &[2]).unwrap();
        let two = Array::from_bytes(vec![0; 8], "<M8[ns]".parse().unwrap(), &[]).unwrap();
        let mut archive = io::Cursor::new(Vec::new());
        write_npz([("one", &one), ("two", &two)], &mut archive).unwrap();
        let file = archive.into_inner();
        let back = read_npz(io::Cursor::new(&file), 1 << 20).unwrap();
        let error = read_npz(io::Cursor::new(&file), 200).unwrap_err().to_string();
        assert!(error.contains("over 200 bytes"), "{error}");
        assert_eq!(back, [("one".to_owned(), one), ("two".to_owned(), two)]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_file_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(bytes);
        }

        #[test]
        fn any_header_is_a_file_or_an_error(text in "[\\[\\](){}'\",:<>|=a-zA-Z0-9 \\\\]{0,120}") {
            let _ = read(file(&text, &[]));
        }
    }
}
