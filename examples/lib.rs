//! Programs to copy; each is one file beside this one.
