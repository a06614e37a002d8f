//! The instructions of a pickle, read and measured: nothing is claimed that is not there.
//!
//! After `pickletools` of CPython 3.13, protocols 0 to 5.

use rung::{Reason, Refusal};

/// One instruction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Op<'a> {
    Mark,
    Stop,
    Pop,
    PopMark,
    Dup,
    None,
    Bool(bool),
    Int(i64),
    /// Little-endian two's complement, of any length.
    Long(&'a [u8]),
    /// Decimal digits.
    Digits(&'a str),
    Float(f64),
    Text(&'a str),
    /// Raw-unicode-escape, without escapes read.
    Escaped(&'a [u8]),
    Bytes(&'a [u8]),
    EmptyList,
    EmptyTuple,
    EmptyDict,
    EmptySet,
    /// Since the mark.
    List,
    Tuple,
    Dict,
    /// Of so many.
    TupleOf(usize),
    Append,
    Appends,
    SetItem,
    SetItems,
    AddItems,
    Put(usize),
    Memoize,
    Get(usize),
    Global(&'a str, &'a str),
    StackGlobal,
    Reduce,
    /// A version, or a frame: nothing to do.
    Nothing,
    /// What only an interpreter can do, by its name in `pickletools`.
    Other(&'static str),
}

pub(crate) fn malformed(what: impl Into<String>) -> Refusal {
    Refusal::new(Reason::BadMetadata, what)
}

pub(crate) struct Ops<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Ops<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Where the next instruction begins.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.at == self.bytes.len()
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Refusal> {
        let end = self.at.checked_add(len).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or_else(|| malformed(format!("cut at byte {}", self.at)))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N], Refusal> {
        let mut number = [0; N];
        number.copy_from_slice(self.take(N)?);
        Ok(number)
    }

    /// As many bytes as a number of `N` bytes before them says.
    fn counted<const N: usize>(&mut self) -> Result<&'a [u8], Refusal> {
        let mut wide = [0; 8];
        wide[..N].copy_from_slice(&self.number::<N>()?);
        let len = usize::try_from(u64::from_le_bytes(wide));
        self.take(len.unwrap_or(usize::MAX))
    }

    fn line(&mut self) -> Result<&'a [u8], Refusal> {
        let rest = &self.bytes[self.at..];
        let len = rest.iter().position(|byte| *byte == b'\n');
        let len = len.ok_or_else(|| malformed(format!("a line without an end at {}", self.at)))?;
        let line = self.take(len)?;
        self.take(1)?;
        Ok(line)
    }

    fn text_line(&mut self) -> Result<&'a str, Refusal> {
        let at = self.at;
        std::str::from_utf8(self.line()?).map_err(|_| malformed(format!("no text at byte {at}")))
    }

    fn index_line(&mut self) -> Result<usize, Refusal> {
        let at = self.at;
        let line = self.text_line()?;
        line.parse().map_err(|_| malformed(format!("no number at byte {at}")))
    }

    /// What Python calls a string: not text to us where it holds half of a surrogate pair.
    fn text(&self, bytes: &'a [u8]) -> Op<'a> {
        std::str::from_utf8(bytes).map_or(Op::Other("a string that is no Unicode"), Op::Text)
    }

    /// Python 2's strings: text to Python 3 where they are ASCII.
    fn old_string(&self, bytes: &'a [u8]) -> Op<'a> {
        if bytes.is_ascii() { self.text(bytes) } else { Op::Other("a string of Python 2") }
    }

    pub(crate) fn next(&mut self) -> Result<Op<'a>, Refusal> {
        let at = self.at;
        let [code] = self.number()?;
        Ok(match code {
            b'(' => Op::Mark,
            b'.' => Op::Stop,
            b'0' => Op::Pop,
            b'1' => Op::PopMark,
            b'2' => Op::Dup,
            b'N' => Op::None,
            0x88 => Op::Bool(true),
            0x89 => Op::Bool(false),
            b'I' => match self.text_line()? {
                "00" => Op::Bool(false),
                "01" => Op::Bool(true),
                digits => Op::Digits(digits),
            },
            b'L' => {
                let line = self.text_line()?;
                Op::Digits(line.strip_suffix('L').unwrap_or(line))
            }
            b'J' => Op::Int(i32::from_le_bytes(self.number()?).into()),
            b'K' => Op::Int(u8::from_le_bytes(self.number()?).into()),
            b'M' => Op::Int(u16::from_le_bytes(self.number()?).into()),
            0x8a => Op::Long(self.counted::<1>()?),
            0x8b => Op::Long(self.counted::<4>()?),
            b'F' => {
                let line = self.text_line()?;
                let number = line.parse();
                Op::Float(number.map_err(|_| malformed(format!("no number at byte {at}")))?)
            }
            b'G' => Op::Float(f64::from_be_bytes(self.number()?)),
            b'S' => {
                let line = self.line()?;
                let quoted = match line {
                    [b'\'', inner @ .., b'\''] | [b'"', inner @ .., b'"'] => Some(inner),
                    _ => None,
                };
                let quoted = quoted.ok_or_else(|| malformed(format!("no string at byte {at}")))?;
                if quoted.contains(&b'\\') {
                    Op::Other("a string of Python 2")
                } else {
                    self.old_string(quoted)
                }
            }
            b'T' => {
                let bytes = self.counted::<4>()?;
                self.old_string(bytes)
            }
            b'U' => {
                let bytes = self.counted::<1>()?;
                self.old_string(bytes)
            }
            b'V' => Op::Escaped(self.line()?),
            b'X' => {
                let bytes = self.counted::<4>()?;
                self.text(bytes)
            }
            0x8c => {
                let bytes = self.counted::<1>()?;
                self.text(bytes)
            }
            0x8d => {
                let bytes = self.counted::<8>()?;
                self.text(bytes)
            }
            b'B' => Op::Bytes(self.counted::<4>()?),
            b'C' => Op::Bytes(self.counted::<1>()?),
            0x8e => Op::Bytes(self.counted::<8>()?),
            b']' => Op::EmptyList,
            b')' => Op::EmptyTuple,
            b'}' => Op::EmptyDict,
            0x8f => Op::EmptySet,
            b'l' => Op::List,
            b't' => Op::Tuple,
            b'd' => Op::Dict,
            0x85 => Op::TupleOf(1),
            0x86 => Op::TupleOf(2),
            0x87 => Op::TupleOf(3),
            b'a' => Op::Append,
            b'e' => Op::Appends,
            b's' => Op::SetItem,
            b'u' => Op::SetItems,
            0x90 => Op::AddItems,
            b'p' => Op::Put(self.index_line()?),
            b'q' => Op::Put(u8::from_le_bytes(self.number()?).into()),
            b'r' => Op::Put(u32::from_le_bytes(self.number()?) as usize),
            0x94 => Op::Memoize,
            b'g' => Op::Get(self.index_line()?),
            b'h' => Op::Get(u8::from_le_bytes(self.number()?).into()),
            b'j' => Op::Get(u32::from_le_bytes(self.number()?) as usize),
            b'c' => Op::Global(self.text_line()?, self.text_line()?),
            0x93 => Op::StackGlobal,
            b'R' => Op::Reduce,
            0x80 => {
                let [version] = self.number()?;
                if version > 5 {
                    return Err(malformed(format!("protocol {version}")));
                }
                Op::Nothing
            }
            0x95 => {
                let _: [u8; 8] = self.number()?;
                Op::Nothing
            }
            0x96 => {
                self.counted::<8>()?;
                Op::Other("BYTEARRAY8")
            }
            b'i' => {
                self.line()?;
                self.line()?;
                Op::Other("INST")
            }
            b'P' => {
                self.line()?;
                Op::Other("PERSID")
            }
            0x82 => {
                self.take(1)?;
                Op::Other("EXT1")
            }
            0x83 => {
                self.take(2)?;
                Op::Other("EXT2")
            }
            0x84 => {
                self.take(4)?;
                Op::Other("EXT4")
            }
            b'o' => Op::Other("OBJ"),
            b'b' => Op::Other("BUILD"),
            b'Q' => Op::Other("BINPERSID"),
            0x81 => Op::Other("NEWOBJ"),
            0x92 => Op::Other("NEWOBJ_EX"),
            0x91 => Op::Other("FROZENSET"),
            0x97 => Op::Other("NEXT_BUFFER"),
            0x98 => Op::Other("READONLY_BUFFER"),
            other => return Err(malformed(format!("no instruction {other:#04x}, at byte {at}"))),
        })
    }
}
