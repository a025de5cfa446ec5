//! Parameters of a map.

use crate::raw::RawMap;
use crate::raw::params::{MAX_BUCKET_CAPACITY, Params};
use crate::raw::segment::MAX_BUCKETS;
use crate::{DytisMap, DytisSet, Error, Key};

/// Builds maps and sets with parameters of one's own; the defaults measured best.
///
/// # Examples
/// ```
/// use dytis::{DytisBuilder, DytisMap};
///
/// let mut map: DytisMap<u64, u64> = DytisBuilder::new().with_segment_buckets(16).build()?;
/// map.insert(3, 4);
///
/// let error = DytisBuilder::new().with_bucket_capacity(1).build::<u64, u64>().unwrap_err();
/// assert_eq!(error.to_string(), "bucket_capacity must lie in 2..=32, got 1");
/// # Ok::<(), dytis::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DytisBuilder {
    bucket_capacity: usize,
    segment_buckets: usize,
    utilization_threshold: usize,
    directory_slack: usize,
}

impl Default for DytisBuilder {
    fn default() -> Self {
        Self::new()
    }
}

impl DytisBuilder {
    /// A builder with the default parameters.
    pub const fn new() -> Self {
        let params = Params::DEFAULT;
        Self {
            bucket_capacity: params.bucket_capacity as usize,
            segment_buckets: params.segment_buckets as usize,
            utilization_threshold: params.threshold as usize,
            directory_slack: params.slack as usize,
        }
    }

    /// Pairs per bucket, 2 to 32 (default 32). Values of more than 64 bytes lower it to 16, of more than 512 bytes to 8.
    #[must_use]
    pub const fn with_bucket_capacity(mut self, pairs: usize) -> Self {
        self.bucket_capacity = pairs;
        self
    }

    /// Buckets per segment, 2 to 64 (default 64): a segment that has them all splits.
    #[must_use]
    pub const fn with_segment_buckets(mut self, buckets: usize) -> Self {
        self.segment_buckets = buckets;
        self
    }

    /// The paper's `U_t` in per cent, 0 to 90 (default 66; paper 60): a segment that is emptier when a bucket overflows is
    /// remapped, a fuller one expands.
    #[must_use]
    pub const fn with_utilization_threshold(mut self, per_cent: usize) -> Self {
        self.utilization_threshold = per_cent;
        self
    }

    /// Directory slots per child, 1 to 64 (default 16), that a directory may have (128 in any case); where keys are denser than these
    /// tell apart, a further level is opened.
    #[must_use]
    pub const fn with_directory_slack(mut self, slots: usize) -> Self {
        self.directory_slack = slots;
        self
    }

    fn params(&self) -> Result<Params, Error> {
        let check = |name, value, min, max| {
            if (min..=max).contains(&value) {
                Ok(value as u8)
            } else {
                Err(Error::Parameter {
                    name,
                    value,
                    min,
                    max,
                })
            }
        };
        Ok(Params {
            bucket_capacity: check(
                "bucket_capacity",
                self.bucket_capacity,
                2,
                MAX_BUCKET_CAPACITY,
            )?,
            segment_buckets: check("segment_buckets", self.segment_buckets, 2, MAX_BUCKETS)?,
            threshold: check("utilization_threshold", self.utilization_threshold, 0, 90)?,
            slack: check("directory_slack", self.directory_slack, 1, 64)?,
        })
    }

    /// An empty map with these parameters.
    ///
    /// # Errors
    /// [`Error::Parameter`] if a parameter is out of its range.
    pub fn build<K: Key, V>(&self) -> Result<DytisMap<K, V>, Error> {
        Ok(DytisMap::from_raw(RawMap::new(self.params()?)))
    }

    /// An empty set with these parameters.
    ///
    /// # Errors
    /// [`Error::Parameter`] if a parameter is out of its range.
    pub fn build_set<K: Key>(&self) -> Result<DytisSet<K>, Error> {
        Ok(DytisSet::from_map(self.build()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_parameter_names_itself_and_its_range() {
        let new = DytisBuilder::new;
        for (builder, text) in [
            (
                new().with_bucket_capacity(33),
                "bucket_capacity must lie in 2..=32, got 33",
            ),
            (
                new().with_segment_buckets(1),
                "segment_buckets must lie in 2..=64, got 1",
            ),
            (
                new().with_utilization_threshold(91),
                "utilization_threshold must lie in 0..=90, got 91",
            ),
            (
                new().with_directory_slack(0),
                "directory_slack must lie in 1..=64, got 0",
            ),
        ] {
            assert_eq!(
                ToString::to_string(&builder.build::<u64, ()>().unwrap_err()),
                text
            );
        }
    }
}
