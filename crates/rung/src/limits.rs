//! Every cap of the ladder, in one place: what a peer says is held to these before it is believed.

/// Bytes of one frame's JSON, at most.
pub const FRAME_BYTES: usize = 64 << 20;

/// Platform handles (descriptors) of one frame, at most: what Linux passes in one message
/// (`SCM_MAX_FD`, unix(7)).
pub const FRAME_HANDLES: usize = 253;

/// Storages of one message, at most.
pub const STORAGES: usize = 65_536;

/// Nesting of a [`Value`](crate::Value), at most: a bare primitive has depth 1.
pub const VALUE_DEPTH: usize = 128;

/// Values that one value consists of, at most: what a frame of nothing but zeros would be in memory is
/// many times its text.
pub const NODES: usize = 1_000_000;

/// Dimensions of a tensor, at most.
pub const RANK: usize = 64;

/// Bytes of a string or byte string that stays in the JSON; a longer one rides a carrier.
pub const INLINE_TEXT: usize = 4 << 10;

/// Encoded bytes of one tensor-free subtree that stays in the JSON.
pub const INLINE_SUBTREE: usize = 64 << 10;

/// Digits of an integer that does not fit 64 bits, at most.
pub const BIG_INT_DIGITS: usize = 4_096;

/// Bytes of a rung's name on the wire, at most.
pub const RUNG_NAME: usize = 32;

/// Bytes of an error's code on the wire, at most.
pub const ERROR_CODE: usize = 256;

/// Bytes of a method's name on the wire, at most.
pub const METHOD_NAME: usize = 1 << 10;
