//! The profile of a stream, its class and its table.

use core::fmt;

use super::options::ProfileOptions;
use crate::Error;
use crate::Key;

/// A skewness from which a stream counts as skewed, in models squared. Uniform keys measure 0 to
/// 0.1 at the default options: a variance of 1 means that the number of models differs by one
/// from slice to slice as a rule.
const SKEWED_FROM: f64 = 1.0;
/// A divergence from which a stream counts as drifting, in nats above the floor. Shuffled keys
/// measure the floor or less.
const DRIFTING_FROM: f64 = 0.25;

/// How a stream of keys changes, in two words.
///
/// *Skewed* from a variance of skewness of 1 on, *drifting* from a divergence of 0.25 nats above
/// the sampling floor on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DynamicClass {
    /// Neither: one shape fits everywhere and keeps fitting.
    Steady,
    /// Uneven over the key space, alike over time.
    Skewed,
    /// Even over the key space, changing over time.
    Drifting,
    /// Uneven over the key space and changing over time.
    SkewedDrifting,
}

impl fmt::Display for DynamicClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Steady => "steady",
            Self::Skewed => "skewed",
            Self::Drifting => "drifting",
            Self::SkewedDrifting => "skewed and drifting",
        })
    }
}

/// The measures of a stream of keys; `Display` prints them as a table.
///
/// # Examples
///
/// ```
/// use dytis::dynamics::DynamicProfile;
///
/// let profile = DynamicProfile::of((0..20_000_u64).map(|i| i * i))?;
/// assert!(profile.to_string().contains("drifting"));
/// # Ok::<(), dytis::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct DynamicProfile {
    /// Keys seen, those of an unfinished last part included.
    pub keys: usize,
    /// Keys in a part.
    pub part_len: usize,
    /// Parts measured.
    pub parts: usize,
    /// Variance of skewness: mean over the parts, in models squared.
    pub skewness: f64,
    /// The most skewed part's.
    pub skewness_max: f64,
    /// Linear models that a part needs, mean over the parts.
    pub models_per_part: f64,
    /// Key distribution divergence: mean over successive parts, in nats.
    pub kdd: f64,
    /// The largest between two successive parts.
    pub kdd_max: f64,
    /// About what `kdd` is for a distribution that does not change
    /// ([`ProfileOptions::kdd_floor`]).
    pub kdd_floor: f64,
    /// Share of all keys that came above every key before them, 0 to 1.
    pub append_share: f64,
}

impl DynamicProfile {
    /// Profiles a stream with the default options.
    ///
    /// # Errors
    ///
    /// [`Error::TooFewKeys`] below 8192 keys, two parts of the default length.
    pub fn of<K: Key>(keys: impl IntoIterator<Item = K>) -> Result<Self, Error> {
        ProfileOptions::new().profile(keys)
    }

    /// The stream's class.
    pub fn class(&self) -> DynamicClass {
        let skewed = self.skewness >= SKEWED_FROM;
        let drifting = self.kdd >= self.kdd_floor + DRIFTING_FROM;
        match (skewed, drifting) {
            (false, false) => DynamicClass::Steady,
            (true, false) => DynamicClass::Skewed,
            (false, true) => DynamicClass::Drifting,
            (true, true) => DynamicClass::SkewedDrifting,
        }
    }
}

impl fmt::Display for DynamicProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "class                     {:>20}", self.class())?;
        writeln!(f, "keys                      {:>20}", self.keys)?;
        writeln!(
            f,
            "parts x keys              {:>12} x {:>5}",
            self.parts, self.part_len
        )?;
        writeln!(f, "variance of skewness      {:>20.3}", self.skewness)?;
        writeln!(f, "  most skewed part        {:>20.3}", self.skewness_max)?;
        writeln!(
            f,
            "linear models per part    {:>20.1}",
            self.models_per_part
        )?;
        writeln!(f, "divergence (KDD), nats    {:>20.3}", self.kdd)?;
        writeln!(f, "  largest step            {:>20.3}", self.kdd_max)?;
        writeln!(f, "  unchanging stream, about{:>20.3}", self.kdd_floor)?;
        write!(
            f,
            "keys that append          {:>18.1} %",
            self.append_share * 100.0
        )
    }
}
