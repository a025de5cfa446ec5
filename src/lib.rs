//! hpmd.
