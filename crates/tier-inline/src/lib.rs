//! The lowest rung: primitives and small containers, exactly, in the JSON itself.
//!
//! It needs nothing of the platform, so it is always there; every other rung is measured against
//! what it says a value is. The [`codec`] is also the skeleton of every message: containers that
//! hold tensors are written by it, with the tensors spliced in by whoever moves them.
//!
//! ```
//! use rung::{Leaf, Room, Rung, Session, Trust, Value};
//! use tier_inline::Inline;
//!
//! let offer = Inline.probe()?;
//! let Session::Form(form) = Inline.open(&offer, &offer, Trust::none())? else { panic!() };
//!
//! let value = Value::map([("nan", Value::from(f64::NAN)), ("pair", Value::tuple([1, 2]))]);
//! let lowered = form.lower(Leaf::Plain(&value))?;
//! assert_eq!(lowered.meta.as_json(), r#"{"nan":{"$f":"7ff8000000000000"},"pair":{"$t":[1,2]}}"#);
//! assert_eq!(form.raise(lowered, &mut Room::of(0))?, value);
//! # Ok::<(), rung::Fault>(())
//! ```
//!
//! # What it does not do
//!
//! It takes nothing bulky: a string past 4 KiB, a subtree past 64 KiB or a tensor is a refusal.

pub mod codec;

use rung::{
    Fault, Fill, Form, Leaf, Lowered, Meta, Offer, Reason, Refusal, Room, Rung, RungId, Session,
    Trust, Unsendable, Value, limits,
};

/// The version of the grammar in [`codec`].
const GRAMMAR: u32 = 1;

/// The rung.
#[derive(Debug, Clone, Copy, Default)]
pub struct Inline;

impl Rung for Inline {
    fn id(&self) -> RungId {
        RungId::INLINE
    }

    fn probe(&self) -> Result<Offer, Refusal> {
        Ok(Offer::of_version(self.id(), GRAMMAR)?)
    }

    fn open(&self, _mine: &Offer, peer: &Offer, _trust: Trust) -> Result<Session, Refusal> {
        peer.expect_version("grammar", GRAMMAR)?;
        Ok(Session::Form(Box::new(InlineForm)))
    }
}

/// Appends a plain value as JSON, and says how many bytes it took.
///
/// # Errors
///
/// As [`codec::encode`], and [`Reason::TooLarge`] past 64 KiB.
pub fn write(value: &Value, out: &mut String) -> Result<usize, Unsendable> {
    let before = out.len();
    codec::encode(value, out, &mut codec::Plain)?;
    let len = out.len() - before;
    if len <= limits::INLINE_SUBTREE {
        return Ok(len);
    }
    let detail = format!("{len} bytes of JSON, at most {}", limits::INLINE_SUBTREE);
    let refusals = vec![(RungId::INLINE, Refusal::new(Reason::TooLarge, detail))];
    Err(Unsendable { path: "$".into(), kind: value.kind().to_owned(), refusals })
}

#[derive(Debug)]
struct InlineForm;

impl Form for InlineForm {
    fn lower(&self, leaf: Leaf<'_>) -> Result<Lowered, Refusal> {
        let Leaf::Plain(value) = leaf else {
            return Err(Reason::OtherKind.into());
        };
        let mut text = String::new();
        write(value, &mut text).map_err(|unsendable| {
            let at = match unsendable.path.as_str() {
                "$" => String::new(),
                path => format!("{path} in it: "),
            };
            let (_, refusal) = unsendable
                .refusals
                .into_iter()
                .next()
                .unwrap_or((RungId::INLINE, Reason::OtherKind.into()));
            Refusal::new(refusal.reason(), format!("{at}{}", refusal.detail()))
        })?;
        let meta = Meta::from_json(text)?;
        Ok(Lowered { meta, views: Vec::new() })
    }

    /// Every kind of plain value, by their limits and by chance.
    fn specimens(&self, random: Fill<'_>) -> Result<Vec<Value>, Refusal> {
        let mut bits = [0; 8];
        random(&mut bits);
        let integer = i64::from_le_bytes(bits);
        random(&mut bits);
        let double = f64::from_bits(u64::from_le_bytes(bits));
        let mut bytes = vec![0; 200];
        random(&mut bytes);
        let text = bytes.iter().map(|byte| char::from(*byte));
        let text: String = text.chain("\u{0}\"\\ naïve 火箭 \u{1f680}".chars()).collect();
        let floats = [double, -0.0, f64::INFINITY, f64::MAX, 5e-324];
        let entries = [
            ("null", Value::Null),
            ("bools", Value::list([true, false])),
            ("integers", Value::list([integer, i64::MIN, i64::MAX])),
            ("large", Value::tuple([i128::from(integer).wrapping_shl(60), i128::MIN])),
            ("floats", Value::list(floats)),
            ("nan", Value::from(f64::from_bits(0x7ff8_0000_0000_0001 | u64::from(bits[0]) << 8))),
            ("text", Value::from(text)),
            ("bytes", Value::bytes(bytes)),
            ("set", Value::set([integer, integer.wrapping_add(1)])),
            ("$t", Value::map([(Value::from(integer), Value::tuple::<Value>([]))])),
        ];
        Ok(vec![Value::map(entries)])
    }

    fn raise(&self, lowered: Lowered, _room: &mut Room) -> Result<Value, Fault> {
        codec::decode(lowered.meta.as_json(), &mut codec::Plain)
    }
}
