//! The sums that ranks exchange.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::gather::Gather;

/// Counts and sums of one rank's statistics.
const COUNTS: usize = 9;
const SUMS: usize = 10;
/// Numbers on the network: a count travels as two, below and above 2^32, so that sums over up to 2^20 ranks stay exact.
const SCALARS: usize = 2 * COUNTS + SUMS;
const COUNT_NAMES: [&str; COUNTS] = [
    "number of micro-batches",
    "number of samples",
    "number of replicas",
    "number of parameters",
    "number of measured elements",
    "number of summed elements",
    "number of elements of the halves",
    "number of elements of the step before",
    "number of samples of the step before",
];
const LOW_WORD: u64 = (1 << 32) - 1;

/// Sums over micro-batch gradients: of one rank, or of several after [`merge`](Self::merge) or
/// [`gather`](Self::gather).
///
/// With micro-batches of b_k samples whose mean gradients are g_k, accumulated with weights w_k proportional to b_k, the
/// statistics hold K, B = sum b_k, W = sum w_k, `S1' = sum_k b_k |g_k|^2` and `S2' = |sum_k w_k g_k|^2`. For equal sizes b
/// and weights 1 these are the S1 and S2 of the literature with S1' = b S1, S2' = S2. Every field is a sum, so merging is
/// addition: commutative to the bit, associative up to the rounding of `f64`.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct MicroBatchStats {
    pub(crate) micro_batches: u64,
    pub(crate) samples: u64,
    pub(crate) replicas: u64,
    /// Counted elements of all layouts; divided by the replicas, the size of the model.
    pub(crate) parameters: u64,
    /// Counted elements times micro-batches that went into `s1`.
    pub(crate) measured: u64,
    /// Elements of the summed gradient that went into `s2`.
    pub(crate) summed: u64,
    pub(crate) weight: f64,
    /// Sum of w_k^2 / b_k; equals W^2 / B exactly when weights are proportional to samples.
    pub(crate) weight_sq_per_sample: f64,
    pub(crate) s1: f64,
    pub(crate) s2: f64,
    pub(crate) halves: HalfSums,
    pub(crate) previous: PreviousSums,
}

/// Sums over the gradients of the two halves of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct HalfSums {
    pub(crate) elements: u64,
    pub(crate) first_sq: f64,
    pub(crate) second_sq: f64,
    pub(crate) dot: f64,
}

/// Sums over the summed gradient of the step before.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct PreviousSums {
    pub(crate) elements: u64,
    pub(crate) samples: u64,
    pub(crate) weight: f64,
    pub(crate) norm_sq: f64,
    pub(crate) dot: f64,
}

impl MicroBatchStats {
    /// Number of micro-batches K, over all replicas that were merged.
    pub const fn micro_batches(&self) -> u64 {
        self.micro_batches
    }

    /// Number of samples B.
    pub const fn samples(&self) -> u64 {
        self.samples
    }

    /// Number of elements of the model that are counted, by the layouts merged so far.
    pub fn parameters(&self) -> u64 {
        self.parameters / self.replicas.max(1)
    }

    /// `sum_k b_k |g_k|^2`, in squared units of the mean gradient times samples.
    pub const fn weighted_norms(&self) -> f64 {
        self.s1
    }

    /// `|sum_k (b_k / B) g_k|^2`: the squared norm of the mean gradient of the whole batch.
    pub fn mean_gradient_sq(&self) -> f64 {
        self.s2 / (self.weight * self.weight)
    }

    /// Adds the sums of another rank.
    ///
    /// # Errors
    /// [`Error::Overflow`] if a count leaves 64 bits.
    ///
    /// # Examples
    /// ```
    /// # use adaptive_batch::MicroBatchStats;
    /// let nothing = MicroBatchStats::default();
    /// assert_eq!(nothing.merge(&nothing)?, nothing);
    /// # Ok::<(), adaptive_batch::Error>(())
    /// ```
    pub fn merge(&self, other: &Self) -> Result<Self> {
        let mut counts = self.counts();
        for (i, (count, other)) in counts.iter_mut().zip(other.counts()).enumerate() {
            *count = count.checked_add(other).ok_or(Error::Overflow {
                what: COUNT_NAMES[i],
            })?;
        }
        let mut sums = self.sums();
        for (sum, other) in sums.iter_mut().zip(other.sums()) {
            *sum += other;
        }
        Ok(Self::from_parts(counts, sums))
    }

    /// Adds up the statistics of all ranks; every rank gets the same. Moves 29 numbers whatever the size of the model.
    ///
    /// Where a rank may fail before it comes here, use
    /// [`GradientMeter::finish_gathered`](crate::GradientMeter::finish_gathered), which no rank waits in alone.
    ///
    /// # Errors
    /// What the communicator returns.
    pub fn gather(&self, gather: &mut impl Gather) -> Result<Self> {
        Ok(Self::gather_all(Ok(*self), gather)?.1)
    }

    /// The collective behind both gathers: a rank that refused its part takes part all the same. Returns the rank's own
    /// statistics and those of all.
    pub(crate) fn gather_all(own: Result<Self>, gather: &mut impl Gather) -> Result<(Self, Self)> {
        let mut scalars = [0.0; SCALARS + 1];
        match &own {
            Ok(stats) => scalars[1..].copy_from_slice(&stats.to_scalars()),
            Err(_) => scalars[0] = 1.0,
        }
        gather.all_reduce_sum(&mut scalars)?;
        let own = own?;
        let [refused, all @ ..] = scalars;
        if refused > 0.0 {
            return Err(Error::OtherRanks {
                ranks: refused as u64,
            });
        }
        Ok((own, Self::from_scalars(&all)?))
    }

    /// All counts, in the order in which they travel.
    fn counts(&self) -> [u64; COUNTS] {
        [
            self.micro_batches,
            self.samples,
            self.replicas,
            self.parameters,
            self.measured,
            self.summed,
            self.halves.elements,
            self.previous.elements,
            self.previous.samples,
        ]
    }

    /// All sums, in the order in which they travel.
    fn sums(&self) -> [f64; SUMS] {
        [
            self.weight,
            self.weight_sq_per_sample,
            self.s1,
            self.s2,
            self.halves.first_sq,
            self.halves.second_sq,
            self.halves.dot,
            self.previous.weight,
            self.previous.norm_sq,
            self.previous.dot,
        ]
    }

    fn from_parts(counts: [u64; COUNTS], sums: [f64; SUMS]) -> Self {
        let [
            micro_batches,
            samples,
            replicas,
            parameters,
            measured,
            summed,
            half_elements,
            previous_elements,
            previous_samples,
        ] = counts;
        let [
            weight,
            weight_sq_per_sample,
            s1,
            s2,
            first_sq,
            second_sq,
            half_dot,
            previous_weight,
            norm_sq,
            previous_dot,
        ] = sums;
        Self {
            micro_batches,
            samples,
            replicas,
            parameters,
            measured,
            summed,
            weight,
            weight_sq_per_sample,
            s1,
            s2,
            halves: HalfSums {
                elements: half_elements,
                first_sq,
                second_sq,
                dot: half_dot,
            },
            previous: PreviousSums {
                elements: previous_elements,
                samples: previous_samples,
                weight: previous_weight,
                norm_sq,
                dot: previous_dot,
            },
        }
    }

    fn to_scalars(self) -> [f64; SCALARS] {
        let mut scalars = [0.0; SCALARS];
        for (pair, count) in scalars.chunks_exact_mut(2).zip(self.counts()) {
            pair[0] = (count & LOW_WORD) as f64;
            pair[1] = (count >> 32) as f64;
        }
        scalars[2 * COUNTS..].copy_from_slice(&self.sums());
        scalars
    }

    fn from_scalars(scalars: &[f64; SCALARS]) -> Result<Self> {
        let mut counts = [0; COUNTS];
        for (count, pair) in counts.iter_mut().zip(scalars.chunks_exact(2)) {
            let whole = pair[0] as u128 + ((pair[1] as u128) << 32);
            *count = u64::try_from(whole).map_err(|_| Error::Overflow {
                what: "a count gathered over all ranks",
            })?;
        }
        let mut sums = [0.0; SUMS];
        sums.copy_from_slice(&scalars[2 * COUNTS..]);
        Ok(Self::from_parts(counts, sums))
    }

    /// Checks that everything was measured exactly once and that the weights are those of the samples.
    pub(crate) fn check(&self) -> Result<()> {
        if self.micro_batches == 0 || self.samples == 0 {
            return Err(Error::NoMicroBatch);
        }
        let incomplete = |what, expected, measured| {
            Err(Error::Incomplete {
                what,
                expected,
                measured,
            })
        };
        if self.replicas == 0 || !self.parameters.is_multiple_of(self.replicas) {
            let expected = self.parameters() * self.replicas;
            return incomplete("counted elements of the layouts", expected, self.parameters);
        }
        let expected = self.micro_batches.saturating_mul(self.parameters());
        if self.measured != expected {
            return incomplete("micro-batch gradients", expected, self.measured);
        }
        if self.summed != self.parameters() {
            return incomplete("summed gradient", self.parameters(), self.summed);
        }
        for (what, elements) in [
            ("gradients of the halves", self.halves.elements),
            ("summed gradient of the step before", self.previous.elements),
        ] {
            if elements != 0 && elements != self.parameters() {
                return incomplete(what, self.parameters(), elements);
            }
        }
        // Cauchy-Schwarz: equality holds only for proportional weights. f32 weights are off by up to 2^-24.
        let proportional = self.weight * self.weight / self.samples as f64;
        if (self.weight_sq_per_sample / proportional - 1.0).abs() > 1e-6 {
            return Err(Error::Weights {
                detail: format!(
                    "sum of w^2/b is {}, proportional weights give {proportional}",
                    self.weight_sq_per_sample
                ),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn odd() -> MicroBatchStats {
        let mut counts = [0; COUNTS];
        for (i, count) in counts.iter_mut().enumerate() {
            *count = (1 << (7 * i)) + i as u64;
        }
        let mut sums = [0.0; SUMS];
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = 1.5 + i as f64;
        }
        MicroBatchStats::from_parts(counts, sums)
    }

    #[test]
    fn scalars_round_trip_and_add_like_merge() {
        let stats = odd();
        assert_eq!(
            MicroBatchStats::from_scalars(&stats.to_scalars()).unwrap(),
            stats
        );
        let twice = stats.to_scalars().map(|x| x + x);
        assert_eq!(
            MicroBatchStats::from_scalars(&twice).unwrap(),
            stats.merge(&stats).unwrap()
        );
        let json = serde_json::to_string(&stats).unwrap();
        assert_eq!(
            serde_json::from_str::<MicroBatchStats>(&json).unwrap(),
            stats
        );
    }

    #[test]
    fn counts_beyond_64_bits_are_refused() {
        let many = MicroBatchStats {
            samples: u64::MAX,
            ..MicroBatchStats::default()
        };
        assert!(matches!(
            many.merge(&many),
            Err(Error::Overflow {
                what: "number of samples"
            })
        ));
        let twice = many.to_scalars().map(|x| x + x);
        assert!(matches!(
            MicroBatchStats::from_scalars(&twice),
            Err(Error::Overflow { .. })
        ));
    }

    #[test]
    fn an_empty_step_has_no_statistics() {
        assert!(matches!(
            MicroBatchStats::default().check(),
            Err(Error::NoMicroBatch)
        ));
    }
}
