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

/// Bytes of a map's key that stays a key in the JSON; a longer one is a value like any other.
pub const INLINE_KEY: usize = 128;

/// Bytes of metadata that a form writes into the JSON, if it can put them elsewhere.
pub const INLINE_META: usize = 256;

/// Encoded bytes of the tensor-free subtrees that stay in the JSON of one message, but for small ones
/// ([`INLINE_LEAF`]): what is larger rides a block, as text, bytes or a pickle.
pub const INLINE_SUBTREE: usize = 64 << 10;

/// Encoded bytes of a tensor-free subtree that stays in the JSON whatever else does: about what naming it
/// on a block would take.
pub const INLINE_LEAF: usize = 256;

/// Values in the pickles of one message, at most: each is one byte there at least, and tens here.
pub const PICKLE_NODES: usize = 16_000_000;

/// Bytes of text that the pickles of one message may become, at least; and four times what its blocks have.
pub const RAISED_BYTES: usize = 256 << 20;

/// Views of one leaf that a form took, at most.
pub const LEAF_VIEWS: usize = 4_096;

/// Nesting of NumPy's structured dtypes, at most.
pub const DESCR_DEPTH: usize = 32;

/// Fields of one structured dtype with all that are nested in it, at most.
pub const DESCR_FIELDS: usize = 4_096;

/// Bytes of the header of an `.npy` file, at most.
pub const NPY_HEADER: usize = 1 << 20;

/// Bytes of the tag of a registered type, at most.
pub const OBJECT_TAG: usize = 256;

/// Parts of one object, at most.
pub const OBJECT_PARTS: usize = 65_536;

/// Digits of an integer that does not fit 64 bits, at most.
pub const BIG_INT_DIGITS: usize = 4_096;

/// Bytes of a rung's name on the wire, at most.
pub const RUNG_NAME: usize = 32;

/// Bytes of an error's code on the wire, at most.
pub const ERROR_CODE: usize = 256;

/// Bytes of a method's name on the wire, at most.
pub const METHOD_NAME: usize = 1 << 10;
