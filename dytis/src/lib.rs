//! dytis.
