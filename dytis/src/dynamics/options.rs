//! The measures' parameters, checked before anything is measured.

use super::profile::DynamicProfile;
use super::profiler::DynamicProfiler;
use crate::Error;
use crate::Key;

/// Parameters of a profile; all have defaults.
///
/// | parameter | default | range |
/// |---|---|---|
/// | part length, keys | 4096 | 16 ..= 2^28 |
/// | slices | 64 | 1 ..= 2^16 |
/// | error bound, ranks | 16 | 1 ..= 2^32 - 1 |
/// | bins | 256 | 1 ..= 2^20 |
/// | smoothing, keys per bin | 0.5 | above 0, at most 10^6 |
///
/// The defaults are such that uniform keys need one model in every slice: an error bound of 8 takes
/// the randomness of the 64 keys of a slice for skew.
///
/// # Examples
///
/// ```
/// use dytis::dynamics::ProfileOptions;
///
/// let options = ProfileOptions::new().with_part_len(1024).with_bins(64);
/// let profile = options.profile((0..10_000_u32).rev())?;
/// assert_eq!(profile.parts, 9);
///
/// let error = ProfileOptions::new().with_bins(0).profile(0..10_000_u32).unwrap_err();
/// assert_eq!(error.to_string(), "bins must lie in 1..=1048576, got 0");
/// # Ok::<(), dytis::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[must_use]
pub struct ProfileOptions {
    pub(super) part_len: usize,
    pub(super) slices: usize,
    pub(super) error_bound: usize,
    pub(super) bins: usize,
    pub(super) smoothing: f64,
}

impl Default for ProfileOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl ProfileOptions {
    /// The defaults of the table above.
    pub const fn new() -> Self {
        Self {
            part_len: 4096,
            slices: 64,
            error_bound: 16,
            bins: 256,
            smoothing: 0.5,
        }
    }

    /// Keys in a part of the stream.
    pub const fn with_part_len(mut self, keys: usize) -> Self {
        self.part_len = keys;
        self
    }

    /// Equal slices of a part's key space over which the number of models is compared.
    pub const fn with_slices(mut self, slices: usize) -> Self {
        self.slices = slices;
        self
    }

    /// How many ranks a linear model may be off.
    pub const fn with_error_bound(mut self, ranks: usize) -> Self {
        self.error_bound = ranks;
        self
    }

    /// Equal bins of the key space over which two parts are compared.
    pub const fn with_bins(mut self, bins: usize) -> Self {
        self.bins = bins;
        self
    }

    /// Keys added to each bin before the logarithm, so that an empty bin has one. 0.5 is
    /// Jeffreys' prior.
    pub const fn with_smoothing(mut self, keys_per_bin: f64) -> Self {
        self.smoothing = keys_per_bin;
        self
    }

    /// About what the divergence of two parts of one unchanging distribution that fills all bins
    /// comes to, in nats: `(bins - 1) / part_len`, the mean of half a chi-squared statistic of
    /// two samples.
    pub fn kdd_floor(&self) -> f64 {
        self.bins.saturating_sub(1) as f64 / self.part_len as f64
    }

    /// Profiles a whole stream, in O(n log `part_len`) time and O(`part_len` + `bins`) memory.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] or [`Error::Smoothing`] name a bad parameter,
    /// [`Error::TooFewKeys`] a stream shorter than two parts.
    pub fn profile<K: Key>(
        self,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<DynamicProfile, Error> {
        let mut profiler = self.profiler()?;
        profiler.extend(keys);
        profiler.profile()
    }

    /// The incremental form: takes keys as they come.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] or [`Error::Smoothing`] name a bad parameter.
    pub fn profiler<K: Key>(self) -> Result<DynamicProfiler<K>, Error> {
        check_count("part_len", self.part_len, 16, 1 << 28)?;
        check_slices(self.slices)?;
        check_error_bound(self.error_bound)?;
        check_bins(self.bins)?;
        check_smoothing(self.smoothing)?;
        Ok(DynamicProfiler::with_checked(self))
    }
}

fn check_count(name: &'static str, value: usize, min: usize, max: usize) -> Result<(), Error> {
    if (min..=max).contains(&value) {
        Ok(())
    } else {
        Err(Error::Parameter {
            name,
            value,
            min,
            max,
        })
    }
}

pub(super) fn check_slices(slices: usize) -> Result<(), Error> {
    check_count("slices", slices, 1, 1 << 16)
}

pub(super) fn check_error_bound(ranks: usize) -> Result<(), Error> {
    check_count("error_bound", ranks, 1, u32::MAX as usize)
}

pub(super) fn check_bins(bins: usize) -> Result<(), Error> {
    check_count("bins", bins, 1, 1 << 20)
}

pub(super) fn check_smoothing(smoothing: f64) -> Result<(), Error> {
    if smoothing > 0.0 && smoothing <= 1e6 {
        Ok(())
    } else {
        Err(Error::Smoothing { value: smoothing })
    }
}
