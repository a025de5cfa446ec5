//! The parameters of the structure, with the values that measured best as defaults.

use super::segment::MAX_BUCKETS;

/// The most keys that a bucket may be asked to hold.
pub(crate) const MAX_BUCKET_CAPACITY: usize = 32;

/// Parameters of one map; validated by [`crate::DytisBuilder`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Params {
    /// Keys per bucket, `2..=MAX_BUCKET_CAPACITY`; large values lower it (see [`super::bucket::Shape`]).
    pub(crate) bucket_capacity: u8,
    /// Buckets per segment, `2..=MAX_BUCKETS`.
    pub(crate) segment_buckets: u8,
    /// `U_t` of the paper, in per cent: a fuller segment expands, an emptier one is remapped.
    pub(crate) threshold: u8,
    /// Directory slots that a child may have.
    pub(crate) slack: u8,
}

impl Params {
    pub(crate) const DEFAULT: Self = Self {
        bucket_capacity: MAX_BUCKET_CAPACITY as u8,
        segment_buckets: MAX_BUCKETS as u8,
        threshold: 66,
        slack: 16,
    };
}
