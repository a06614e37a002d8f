//! A machine for the plain part of pickles.
//!
//! The instructions build a graph: nodes in one vector, containers naming nodes by number, so that a
//! container that is referred to twice is one node, is changed in one place, and neither building nor
//! dropping it recurses. The graph then becomes a tree, within bounds of depth and size.

use std::collections::HashMap;
use std::ops::Range;

use rung::{Map, Reason, Refusal, Room, Value, limits};

use crate::ops::{Op, Ops, malformed};

#[derive(Debug)]
enum Node {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    /// Decimal digits past 64 bits.
    Big(Box<str>),
    /// Where in the pickle.
    Text(Range<usize>),
    Owned(Box<str>),
    Bytes(Range<usize>),
    OwnedBytes(Box<[u8]>),
    List(Vec<u32>),
    Tuple(Vec<u32>),
    Set(Vec<u32>),
    Dict(Vec<(u32, u32)>),
    /// One of the calls that are known.
    Call(Call),
}

/// The calls that protocols 0 to 3 need for plain data.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Call {
    /// `_codecs.encode(text, "latin1")`: bytes.
    Encode,
    /// `builtins.bytes()`: none.
    Bytes,
    /// `builtins.set(list)`.
    Set,
}

fn known_call(module: &str, name: &str) -> Option<Call> {
    match (module, name) {
        ("_codecs", "encode") => Some(Call::Encode),
        ("builtins" | "__builtin__", "bytes") => Some(Call::Bytes),
        ("builtins" | "__builtin__", "set") => Some(Call::Set),
        _ => None,
    }
}

/// Why a run ended early.
enum Stop {
    /// The pickle is fine, but not plain.
    NotPlain(String),
    Refused(Refusal),
}

impl From<Refusal> for Stop {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

fn not_plain<T>(what: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::NotPlain(what.into()))
}

/// The value that a pickle holds, where there is room for it.
pub(crate) fn run(bytes: &[u8], room: &mut Room) -> Result<Value, Refusal> {
    let mut machine = Machine {
        bytes,
        ops: Ops::new(bytes),
        nodes: Vec::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
        copied: 0,
    };
    match machine.run() {
        Ok(root) => {
            let most = room.depth.min(limits::VALUE_DEPTH);
            let mut measures = Measures { machine: &machine, known: HashMap::new(), most };
            let all = measures.of(root, 1)?;
            room.take(all.nodes, all.text)?;
            if all.compared > 4 * limits::PICKLE_NODES {
                return Err(Refusal::new(Reason::TooLarge, "sets and keys of sets, nested"));
            }
            machine.value(root)
        }
        Err(Stop::Refused(refusal)) => Err(refusal),
        Err(Stop::NotPlain(what)) => {
            // Not to be opened, but to be passed on: whole.
            machine.skim()?;
            Err(Refusal::new(Reason::NotPlain, what))
        }
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    ops: Ops<'a>,
    nodes: Vec<Node>,
    stack: Vec<u32>,
    /// Heights of the stack.
    marks: Vec<usize>,
    /// By the numbers that the pickle gives, which may have gaps.
    memo: HashMap<usize, u32>,
    /// Items and bytes that calls made again of what was there.
    copied: usize,
}

impl Machine<'_> {
    fn run(&mut self) -> Result<u32, Stop> {
        loop {
            let op = self.ops.next()?;
            if let Some(root) = self.step(op)? {
                return Ok(root);
            }
            // What an instruction of one byte leaves behind takes tens.
            let held = self.stack.len() + self.marks.len() + self.memo.len();
            if held > limits::PICKLE_NODES {
                return Err(Refusal::new(Reason::TooLarge, "the stack of a pickle").into());
            }
        }
    }

    /// The rest of the instructions, looked at and not obeyed.
    fn skim(&mut self) -> Result<(), Refusal> {
        while self.ops.next()? != Op::Stop {}
        self.end()
    }

    /// Nothing comes after the last instruction.
    fn end(&self) -> Result<(), Refusal> {
        if self.ops.is_at_end() {
            return Ok(());
        }
        Err(malformed(format!("more after the end, at byte {}", self.ops.at())))
    }

    fn step(&mut self, op: Op<'_>) -> Result<Option<u32>, Stop> {
        match op {
            Op::Stop => {
                let root = self.pop()?;
                self.end()?;
                return Ok(Some(root));
            }
            Op::Nothing => {}
            Op::Mark => self.marks.push(self.stack.len()),
            Op::Pop => {
                // Python's own machine pops a mark where there is nothing above it.
                if self.marks.last() == Some(&self.stack.len()) {
                    self.marks.pop();
                } else {
                    self.pop()?;
                }
            }
            Op::PopMark => {
                self.since_mark()?;
            }
            Op::Dup => {
                let top = self.top()?;
                self.stack.push(top);
            }
            Op::None => self.push(Node::None)?,
            Op::Bool(truth) => self.push(Node::Bool(truth))?,
            Op::Int(number) => self.push(Node::Int(number))?,
            Op::Long(bytes) => {
                let number = long(bytes)?;
                self.push(number)?;
            }
            Op::Digits(digits) => {
                let number = integer(digits)?;
                self.push(number)?;
            }
            Op::Float(number) => self.push(Node::Float(number))?,
            Op::Text(text) => {
                let range = self.range(text.as_bytes());
                self.push(Node::Text(range))?;
            }
            Op::Escaped(bytes) => match unescaped(bytes)? {
                Some(text) => self.push(Node::Owned(text.into()))?,
                None => return not_plain("a string that is no Unicode"),
            },
            Op::Bytes(bytes) => {
                let range = self.range(bytes);
                self.push(Node::Bytes(range))?;
            }
            Op::EmptyList => self.push(Node::List(Vec::new()))?,
            Op::EmptyTuple => self.push(Node::Tuple(Vec::new()))?,
            Op::EmptyDict => self.push(Node::Dict(Vec::new()))?,
            Op::EmptySet => self.push(Node::Set(Vec::new()))?,
            Op::List => {
                let items = self.since_mark()?;
                self.push(Node::List(items))?;
            }
            Op::Tuple => {
                let items = self.since_mark()?;
                self.push(Node::Tuple(items))?;
            }
            Op::Dict => {
                let items = self.since_mark()?;
                self.push(Node::Dict(pairs(&items)?))?;
            }
            Op::TupleOf(count) => {
                let at = self.stack.len().checked_sub(count).filter(|&at| at >= self.floor());
                let at = at.ok_or_else(|| malformed("the stack is empty"))?;
                let items = self.stack.split_off(at);
                self.push(Node::Tuple(items))?;
            }
            Op::Append => {
                let item = self.pop()?;
                self.extend_list(&[item])?;
            }
            Op::Appends => {
                let items = self.since_mark()?;
                self.extend_list(&items)?;
            }
            Op::AddItems => {
                let items = self.since_mark()?;
                match self.top_node()? {
                    Node::Set(members) => members.extend(items),
                    _ => return Err(malformed("items added to what is no set").into()),
                }
            }
            Op::SetItem => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.extend_dict(&[(key, value)])?;
            }
            Op::SetItems => {
                let items = self.since_mark()?;
                self.extend_dict(&pairs(&items)?)?;
            }
            Op::Put(index) => self.remember(index)?,
            // As many as it remembers: the next number, where there are no gaps.
            Op::Memoize => self.remember(self.memo.len())?,
            Op::Get(index) => {
                let node = self.memo.get(&index).copied();
                let node = node.ok_or_else(|| malformed(format!("no {index} in the memo")))?;
                self.stack.push(node);
            }
            Op::Global(module, name) => self.global(module, name)?,
            Op::StackGlobal => {
                let (name, module) = (self.pop()?, self.pop()?);
                match (self.text(module), self.text(name)) {
                    (Some(module), Some(name)) => {
                        let (module, name) = (module.to_owned(), name.to_owned());
                        self.global(&module, &name)?;
                    }
                    _ => return Err(malformed("a global without its names").into()),
                }
            }
            Op::Reduce => self.reduce()?,
            Op::Other(name) => return not_plain(name),
        }
        Ok(None)
    }

    fn push(&mut self, node: Node) -> Result<(), Stop> {
        if self.nodes.len() >= limits::PICKLE_NODES {
            let detail = format!("over {} values in a pickle", limits::PICKLE_NODES);
            return Err(Refusal::new(Reason::TooLarge, detail).into());
        }
        self.stack.push(self.nodes.len() as u32);
        self.nodes.push(node);
        Ok(())
    }

    /// The height below which nothing may be taken: that of the last mark.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<u32, Refusal> {
        if self.stack.len() <= self.floor() {
            return Err(malformed("the stack is empty"));
        }
        self.stack.pop().ok_or_else(|| malformed("the stack is empty"))
    }

    fn top(&self) -> Result<u32, Refusal> {
        let top = self.stack.last().copied().filter(|_| self.stack.len() > self.floor());
        top.ok_or_else(|| malformed("the stack is empty"))
    }

    fn top_node(&mut self) -> Result<&mut Node, Refusal> {
        let top = self.top()?;
        self.nodes.get_mut(top as usize).ok_or_else(|| malformed("the stack is empty"))
    }

    fn since_mark(&mut self) -> Result<Vec<u32>, Refusal> {
        let mark = self.marks.pop().ok_or_else(|| malformed("no mark is set"))?;
        Ok(self.stack.split_off(mark))
    }

    fn extend_list(&mut self, items: &[u32]) -> Result<(), Refusal> {
        match self.top_node()? {
            Node::List(list) => {
                list.extend(items);
                Ok(())
            }
            _ => Err(malformed("an item appended to what is no list")),
        }
    }

    fn extend_dict(&mut self, items: &[(u32, u32)]) -> Result<(), Refusal> {
        match self.top_node()? {
            Node::Dict(dict) => {
                dict.extend(items);
                Ok(())
            }
            _ => Err(malformed("an item set of what is no dictionary")),
        }
    }

    fn remember(&mut self, index: usize) -> Result<(), Refusal> {
        let top = self.top()?;
        self.memo.insert(index, top);
        Ok(())
    }

    fn global(&mut self, module: &str, name: &str) -> Result<(), Stop> {
        match known_call(module, name) {
            Some(call) => self.push(Node::Call(call)),
            None => {
                let shown: String = format!("{module}.{name}").chars().take(100).collect();
                not_plain(shown)
            }
        }
    }

    /// A call may be made of one thing again and again: what all of them copy is about what a pickle has.
    fn copied(&mut self, more: usize) -> Result<(), Refusal> {
        self.copied = self.copied.saturating_add(more);
        if self.copied > self.bytes.len().max(1 << 20) {
            return Err(Refusal::new(Reason::TooLarge, "what the calls of a pickle make"));
        }
        Ok(())
    }

    fn reduce(&mut self) -> Result<(), Stop> {
        let (arguments, call) = (self.pop()?, self.pop()?);
        let Some(Node::Call(call)) = self.nodes.get(call as usize) else {
            return Err(malformed("a call of what cannot be called").into());
        };
        let Some(Node::Tuple(arguments)) = self.nodes.get(arguments as usize) else {
            return Err(malformed("a call without its arguments").into());
        };
        // At most two matter; a longer tuple is none of the calls that are known.
        let arguments: Vec<u32> = arguments.iter().copied().take(3).collect();
        let node = match (*call, arguments.as_slice()) {
            (Call::Set, [items]) => match self.nodes.get(*items as usize) {
                // What is done to the list later does not change the set.
                Some(Node::List(items)) => {
                    let items = items.clone();
                    self.copied(items.len())?;
                    Node::Set(items)
                }
                _ => return not_plain("builtins.set of no list"),
            },
            (Call::Set, []) => Node::Set(Vec::new()),
            (Call::Bytes, []) => Node::OwnedBytes(Box::default()),
            (Call::Encode, [text, codec]) if self.text(*codec) == Some("latin1") => {
                let text = self.text(*text).ok_or_else(|| malformed("no text to encode"))?;
                let bytes: Option<Box<[u8]>> = text.chars().map(|c| u8::try_from(c).ok()).collect();
                let bytes = bytes.ok_or_else(|| malformed("no latin1 in a byte string"))?;
                self.copied(bytes.len())?;
                Node::OwnedBytes(bytes)
            }
            _ => return not_plain("a call with other arguments"),
        };
        self.push(node)
    }

    fn text(&self, node: u32) -> Option<&str> {
        match self.nodes.get(node as usize)? {
            Node::Text(range) => std::str::from_utf8(self.bytes.get(range.clone())?).ok(),
            Node::Owned(text) => Some(text),
            _ => None,
        }
    }

    /// Where a part of the pickle lies in it.
    fn range(&self, part: &[u8]) -> Range<usize> {
        let at = (part.as_ptr() as usize).saturating_sub(self.bytes.as_ptr() as usize);
        at..at + part.len()
    }
}

fn pairs(items: &[u32]) -> Result<Vec<(u32, u32)>, Refusal> {
    let pairs = items.chunks_exact(2);
    if !pairs.remainder().is_empty() {
        return Err(malformed("a key without a value"));
    }
    Ok(pairs.map(|pair| (pair[0], pair[1])).collect())
}

/// From decimal digits, as Python writes them. Other notations that Python reads are left to it, and so are
/// integers that a value does not hold.
fn integer(digits: &str) -> Result<Node, Stop> {
    match Value::integer(digits) {
        Ok(Value::Int(number)) => Ok(Node::Int(number)),
        Ok(_) => Ok(Node::Big(digits.into())),
        Err(refusal) if refusal.reason() == Reason::TooLarge => not_plain(refusal.to_string()),
        Err(_) if digits.bytes().any(|byte| byte.is_ascii_digit()) => {
            not_plain("an integer in another notation")
        }
        Err(_) => Err(malformed("no integer").into()),
    }
}

/// From little-endian two's complement.
fn long(bytes: &[u8]) -> Result<Node, Stop> {
    let negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
    let filler = if negative { 0xff } else { 0 };
    if bytes.len() <= 16 {
        let mut wide = [filler; 16];
        wide[..bytes.len()].copy_from_slice(bytes);
        let number = i128::from_le_bytes(wide);
        return Ok(match i64::try_from(number) {
            Ok(number) => Node::Int(number),
            Err(_) => Node::Big(number.to_string().into()),
        });
    }
    // As many bytes as the digits that are allowed need at most.
    if bytes.len() > limits::BIG_INT_DIGITS * 5 / 12 + 1 {
        return not_plain(format!("an integer of {} bytes", bytes.len()));
    }
    let mut magnitude: Vec<u8> = bytes.to_vec();
    if negative {
        let mut carry = true;
        for byte in &mut magnitude {
            let (sum, more) = (!*byte).overflowing_add(u8::from(carry));
            (*byte, carry) = (sum, more);
        }
    }
    let mut digits = decimal(&magnitude);
    if negative {
        digits.insert(0, '-');
    }
    integer(&digits)
}

/// Little-endian bytes in decimal.
fn decimal(bytes: &[u8]) -> String {
    // Base 10^9, least first.
    let mut groups: Vec<u32> = vec![0];
    for word in bytes.chunks(4).rev() {
        let mut wide = [0; 4];
        wide[..word.len()].copy_from_slice(word);
        let mut carry = u64::from(u32::from_le_bytes(wide));
        for group in &mut groups {
            let wide = (u64::from(*group) << 32) + carry;
            *group = (wide % 1_000_000_000) as u32;
            carry = wide / 1_000_000_000;
        }
        while carry > 0 {
            groups.push((carry % 1_000_000_000) as u32);
            carry /= 1_000_000_000;
        }
    }
    let mut digits = groups.last().map_or_else(String::new, ToString::to_string);
    for group in groups.iter().rev().skip(1) {
        digits += &format!("{group:09}");
    }
    digits
}

/// Python's raw-unicode-escape: Latin-1 with `\uXXXX` and `\UXXXXXXXX`. None for half of a surrogate pair.
fn unescaped(bytes: &[u8]) -> Result<Option<String>, Refusal> {
    let mut text = String::with_capacity(bytes.len());
    let mut rest = bytes;
    while let [first, after @ ..] = rest {
        let digits = match (first, after) {
            (b'\\', [b'u', ..]) => 4,
            (b'\\', [b'U', ..]) => 8,
            // What follows any other backslash is itself, a backslash too.
            (b'\\', [second, after @ ..]) => {
                text.extend([char::from(*first), char::from(*second)]);
                rest = after;
                continue;
            }
            _ => {
                text.push(char::from(*first));
                rest = after;
                continue;
            }
        };
        let hex = after.get(1..=digits).filter(|hex| hex.iter().all(u8::is_ascii_hexdigit));
        let code = hex.and_then(|hex| std::str::from_utf8(hex).ok());
        let code = code.and_then(|hex| u32::from_str_radix(hex, 16).ok());
        let code = code.ok_or_else(|| malformed("a broken escape"))?;
        match char::from_u32(code) {
            Some(c) => text.push(c),
            None if (0xd800..0xe000).contains(&code) => return Ok(None),
            None => return Err(malformed("a broken escape")),
        }
        rest = &after[1 + digits..];
    }
    Ok(Some(text))
}

/// What a node of the graph becomes as a tree.
#[derive(Debug, Clone, Copy)]
struct Measure {
    nodes: usize,
    /// Bytes of text.
    text: usize,
    height: usize,
    /// What is looked through to see whether keys and items of sets differ: all of each, at every level.
    compared: usize,
}

impl Measure {
    const LEAF: Self = Self { nodes: 1, text: 0, height: 1, compared: 0 };
}

/// Before anything is built: each container is looked into once, however often it is referred to.
struct Measures<'m, 'a> {
    machine: &'m Machine<'a>,
    /// Of containers; none yet of those that are being measured.
    known: HashMap<u32, Option<Measure>>,
    /// Levels, at most.
    most: usize,
}

impl Measures<'_, '_> {
    fn of(&mut self, at: u32, depth: usize) -> Result<Measure, Refusal> {
        let node = self.machine.nodes.get(at as usize);
        Ok(match node.ok_or_else(|| malformed("no such node"))? {
            Node::Text(range) | Node::Bytes(range) => {
                Measure { text: range.len(), ..Measure::LEAF }
            }
            Node::Owned(text) => Measure { text: text.len(), ..Measure::LEAF },
            Node::OwnedBytes(bytes) => Measure { text: bytes.len(), ..Measure::LEAF },
            Node::Big(digits) => Measure { text: digits.len(), ..Measure::LEAF },
            Node::Call(_) => {
                return Err(Refusal::new(Reason::NotPlain, "a function, not called"));
            }
            Node::List(items) | Node::Tuple(items) => {
                self.container(at, depth, &mut items.iter().map(|item| (*item, false)))?
            }
            Node::Set(items) => {
                self.container(at, depth, &mut items.iter().map(|item| (*item, true)))?
            }
            Node::Dict(entries) => {
                let parts = entries.iter().flat_map(|(key, value)| [(*key, true), (*value, false)]);
                self.container(at, depth, &mut { parts })?
            }
            _ => Measure::LEAF,
        })
    }

    fn container(
        &mut self,
        at: u32,
        depth: usize,
        parts: &mut dyn Iterator<Item = (u32, bool)>,
    ) -> Result<Measure, Refusal> {
        let most = self.most;
        let too_deep = || Refusal::new(Reason::TooDeep, format!("at most {}", most));
        match self.known.get(&at) {
            Some(None) => return Err(Reason::Recursive.into()),
            Some(Some(known)) if depth + known.height - 1 > most => {
                return Err(too_deep());
            }
            Some(Some(known)) => return Ok(*known),
            None => {}
        }
        if depth > most {
            return Err(too_deep());
        }
        self.known.insert(at, None);
        let mut all = Measure::LEAF;
        for (part, differs) in parts {
            let part = self.of(part, depth + 1)?;
            let looked = part.nodes.saturating_add(part.text / 16);
            let more = if differs { looked.saturating_add(part.compared) } else { part.compared };
            all.compared = all.compared.saturating_add(more);
            all.nodes = all.nodes.saturating_add(part.nodes);
            all.text = all.text.saturating_add(part.text);
            all.height = all.height.max(part.height + 1);
        }
        if depth + all.height - 1 > most {
            return Err(too_deep());
        }
        self.known.insert(at, Some(all));
        Ok(all)
    }
}

/// To Python two NaNs are two keys; to a value they are one, and nothing may get lost.
fn twice() -> Refusal {
    Refusal::new(Reason::NotPlain, "a key or an item of a set that stands there twice")
}

/// From the graph to a tree, once it has been [measured](Measures).
impl Machine<'_> {
    fn value(&self, at: u32) -> Result<Value, Refusal> {
        let node = self.nodes.get(at as usize).ok_or_else(|| malformed("no such node"))?;
        Ok(match node {
            Node::None => Value::Null,
            Node::Bool(truth) => Value::Bool(*truth),
            Node::Int(number) => Value::Int(*number),
            Node::Float(number) => Value::Float(*number),
            Node::Big(digits) => Value::integer(digits)?,
            Node::Text(_) | Node::Owned(_) => {
                self.text(at).ok_or_else(|| malformed("no text"))?.into()
            }
            Node::Bytes(range) => {
                Value::bytes(self.bytes.get(range.clone()).unwrap_or_default().to_vec())
            }
            Node::OwnedBytes(bytes) => Value::bytes(bytes.to_vec()),
            Node::List(items) => Value::List(self.items(items)?),
            Node::Tuple(items) => Value::Tuple(self.items(items)?),
            Node::Set(items) => Value::try_plain_set(self.items(items)?).map_err(|_| twice())?,
            Node::Dict(entries) => {
                let read = |(key, value): &(u32, u32)| Ok((self.value(*key)?, self.value(*value)?));
                let read = entries.iter().map(read).collect::<Result<_, Refusal>>()?;
                Value::Map(Map::try_from_plain_entries(read).map_err(|_| twice())?)
            }
            Node::Call(_) => {
                return Err(Refusal::new(Reason::NotPlain, "a function, not called"));
            }
        })
    }

    fn items(&self, items: &[u32]) -> Result<Vec<Value>, Refusal> {
        items.iter().map(|item| self.value(*item)).collect()
    }
}

#[cfg(test)]
mod tests;
