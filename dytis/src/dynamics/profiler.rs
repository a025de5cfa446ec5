//! The incremental form of the profile.

use alloc::vec::Vec;
use core::marker::PhantomData;
use core::mem;

use super::divergence::divergence_of;
use super::options::ProfileOptions;
use super::profile::DynamicProfile;
use super::skewness::variance_and_models;
use crate::Error;
use crate::Key;

/// What one completed part of the stream measured.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct PartMeasure {
    /// Number of the part, from 0.
    pub part: usize,
    /// Variance of the number of linear models over the slices of the part's key space.
    pub skewness: f64,
    /// Linear models of all slices together.
    pub models: usize,
    /// Divergence from the part before, in nats; `None` for the first part.
    pub kdd: Option<f64>,
}

/// Profiles a stream as it comes; made by [`ProfileOptions::profiler`].
///
/// Keeps the keys of two parts, nothing older. Gives the same numbers as the offline form.
///
/// # Examples
///
/// ```
/// use dytis::dynamics::ProfileOptions;
///
/// let mut profiler = ProfileOptions::new().with_part_len(1000).profiler::<u64>()?;
/// for key in 0..2500 {
///     if let Some(part) = profiler.push(key) {
///         assert!(part.part == 0 || part.kdd.unwrap() > 1.0);
///     }
/// }
/// assert_eq!(profiler.profile()?.parts, 2);
/// # Ok::<(), dytis::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct DynamicProfiler<K> {
    options: ProfileOptions,
    earlier: Vec<u64>,
    current: Vec<u64>,
    keys: usize,
    highest: Option<u64>,
    appends: usize,
    parts: usize,
    models: usize,
    skewness_sum: f64,
    skewness_max: f64,
    kdd_sum: f64,
    kdd_max: f64,
    key: PhantomData<fn(K)>,
}

impl<K: Key> DynamicProfiler<K> {
    pub(super) fn with_checked(options: ProfileOptions) -> Self {
        Self {
            options,
            earlier: Vec::new(),
            current: Vec::new(),
            keys: 0,
            highest: None,
            appends: 0,
            parts: 0,
            models: 0,
            skewness_sum: 0.0,
            skewness_max: 0.0,
            kdd_sum: 0.0,
            kdd_max: 0.0,
            key: PhantomData,
        }
    }

    /// Takes the next key; returns the measure of the part that it completes, if it completes one.
    ///
    /// Computes in O(1), or O(`part_len` log `part_len` + `bins`) where a part ends.
    pub fn push(&mut self, key: K) -> Option<PartMeasure> {
        let bits = key.to_bits();
        self.keys += 1;
        if self.highest.is_none_or(|highest| bits > highest) {
            self.highest = Some(bits);
            self.appends += 1;
        }
        self.current.push(bits);
        (self.current.len() == self.options.part_len).then(|| self.end_part())
    }

    fn end_part(&mut self) -> PartMeasure {
        let ProfileOptions {
            slices,
            error_bound,
            bins,
            smoothing,
            ..
        } = self.options;
        let kdd =
            (self.parts > 0).then(|| divergence_of(&self.earlier, &self.current, bins, smoothing));
        // The current part becomes the earlier one; its keys are sorted in place, since the
        // divergence takes them in any order and with repeats, and the models once each.
        mem::swap(&mut self.earlier, &mut self.current);
        self.current.clear();
        self.earlier.sort_unstable();
        let mut distinct = self.earlier.clone();
        distinct.dedup();
        let (skewness, models) = variance_and_models(&distinct, slices, error_bound);

        let part = self.parts;
        self.parts += 1;
        self.models += models;
        self.skewness_sum += skewness;
        self.skewness_max = self.skewness_max.max(skewness);
        self.kdd_sum += kdd.unwrap_or(0.0);
        self.kdd_max = self.kdd_max.max(kdd.unwrap_or(0.0));
        PartMeasure {
            part,
            skewness,
            models,
            kdd,
        }
    }

    /// The profile of the parts completed so far.
    ///
    /// Computes in O(1).
    ///
    /// # Errors
    ///
    /// [`Error::TooFewKeys`] before the second part is complete.
    pub fn profile(&self) -> Result<DynamicProfile, Error> {
        let part_len = self.options.part_len;
        if self.parts < 2 {
            return Err(Error::TooFewKeys {
                needed: 2 * part_len,
                part_len,
                got: self.keys,
            });
        }
        let parts = self.parts as f64;
        Ok(DynamicProfile {
            keys: self.keys,
            part_len,
            parts: self.parts,
            skewness: self.skewness_sum / parts,
            skewness_max: self.skewness_max,
            models_per_part: self.models as f64 / parts,
            kdd: self.kdd_sum / (parts - 1.0),
            kdd_max: self.kdd_max,
            kdd_floor: self.options.kdd_floor(),
            append_share: self.appends as f64 / self.keys as f64,
        })
    }
}

impl<K: Key> Extend<K> for DynamicProfiler<K> {
    fn extend<I: IntoIterator<Item = K>>(&mut self, keys: I) {
        for key in keys {
            self.push(key);
        }
    }
}
