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
    Fault, Form, Leaf, Lowered, Meta, Offer, Reason, Refusal, Room, Rung, RungId, Session, Trust,
    Value, limits,
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
        let meta = Meta::write(&GRAMMAR)?;
        Ok(Offer { rung: self.id(), meta, handles: Vec::new() })
    }

    fn open(&self, _mine: &Offer, peer: &Offer, _trust: Trust) -> Result<Session, Refusal> {
        match peer.meta.read::<u32>() {
            Ok(GRAMMAR) => Ok(Session::Form(Box::new(InlineForm))),
            _ => Err(Refusal::new(
                Reason::NotOffered,
                format!("grammar {}, here {GRAMMAR}", peer.meta.as_json()),
            )),
        }
    }
}

#[derive(Debug)]
struct InlineForm;

impl Form for InlineForm {
    fn lower(&self, leaf: Leaf<'_>) -> Result<Lowered, Refusal> {
        let Leaf::Plain(value) = leaf else {
            return Err(Reason::OtherKind.into());
        };
        let mut text = String::new();
        codec::encode(value, &mut text, &mut codec::Plain).map_err(|unsendable| {
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
        if text.len() > limits::INLINE_SUBTREE {
            return Err(Refusal::new(
                Reason::TooLarge,
                format!("{} bytes of JSON, at most {}", text.len(), limits::INLINE_SUBTREE),
            ));
        }
        let meta = Meta::from_json(text)?;
        Ok(Lowered { meta, views: Vec::new() })
    }

    fn raise(&self, lowered: Lowered, _room: &mut Room) -> Result<Value, Fault> {
        codec::decode(lowered.meta.as_json(), &mut codec::Plain)
    }
}
