//! Keys: types that embed into `u64` with their order.

use core::net::Ipv4Addr;

/// A key: an order-preserving embedding into `u64`.
///
/// The map works on the bits alone: [`Key::to_bits`] of every key that is used, [`Key::from_bits`] of every key that is
/// yielded. An implementation that breaks one of the two laws gives wrong answers, but never undefined behaviour.
///
/// # Examples
/// ```
/// use dytis::{DytisMap, Key};
///
/// /// Minutes since some day, then a flight number.
/// #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
/// struct Departure { minute: u32, flight: u16 }
///
/// impl Key for Departure {
///     fn to_bits(self) -> u64 {
///         u64::from(self.minute) << 16 | u64::from(self.flight)
///     }
///     fn from_bits(bits: u64) -> Self {
///         Self { minute: (bits >> 16) as u32, flight: bits as u16 }
///     }
/// }
///
/// let mut map = DytisMap::new();
/// map.insert(Departure { minute: 7, flight: 12 }, "late");
/// assert_eq!(map.first_key_value(), Some((Departure { minute: 7, flight: 12 }, &"late")));
/// ```
pub trait Key: Copy + Ord + Send + Sync + 'static {
    /// The key's bits: `a <= b` exactly if `a.to_bits() <= b.to_bits()`.
    fn to_bits(self) -> u64;

    /// The key with these bits, which came from [`Key::to_bits`]: its exact inverse.
    fn from_bits(bits: u64) -> Self;
}

macro_rules! unsigned {
    ($($int:ty),*) => {$(
        impl Key for $int {
            #[inline]
            fn to_bits(self) -> u64 {
                self as u64
            }
            #[inline]
            fn from_bits(bits: u64) -> Self {
                bits as $int
            }
        }
    )*};
}

#[allow(clippy::cast_lossless, reason = "one macro for all widths")]
mod unsigned {
    use super::Key;
    unsigned!(u8, u16, u32, u64, usize);
}

macro_rules! signed {
    ($($int:ty as $bits:ty),*) => {$(
        impl Key for $int {
            #[inline]
            fn to_bits(self) -> u64 {
                (self as $bits ^ <$int>::MIN as $bits) as u64
            }
            #[inline]
            fn from_bits(bits: u64) -> Self {
                (bits as $bits ^ <$int>::MIN as $bits) as $int
            }
        }
    )*};
}

#[allow(clippy::cast_lossless, reason = "one macro for all widths")]
mod signed {
    use super::Key;
    signed!(i8 as u8, i16 as u16, i32 as u32, i64 as u64, isize as usize);
}

impl Key for char {
    #[inline]
    fn to_bits(self) -> u64 {
        u64::from(u32::from(self))
    }
    #[inline]
    fn from_bits(bits: u64) -> Self {
        Self::from_u32(bits as u32).unwrap_or(Self::REPLACEMENT_CHARACTER)
    }
}

macro_rules! bytes {
    ($($n:literal),*) => {$(
        /// Compares as byte strings do.
        impl Key for [u8; $n] {
            #[inline]
            fn to_bits(self) -> u64 {
                let mut bytes = [0; 8];
                bytes[8 - $n..].copy_from_slice(&self);
                u64::from_be_bytes(bytes)
            }
            #[inline]
            fn from_bits(bits: u64) -> Self {
                let mut key = [0; $n];
                key.copy_from_slice(&bits.to_be_bytes()[8 - $n..]);
                key
            }
        }
    )*};
}

bytes!(1, 2, 3, 4, 5, 6, 7, 8);

impl Key for (u32, u32) {
    #[inline]
    fn to_bits(self) -> u64 {
        u64::from(self.0) << 32 | u64::from(self.1)
    }
    #[inline]
    fn from_bits(bits: u64) -> Self {
        ((bits >> 32) as u32, bits as u32)
    }
}

impl Key for (u16, u16, u32) {
    #[inline]
    fn to_bits(self) -> u64 {
        u64::from(self.0) << 48 | u64::from(self.1) << 32 | u64::from(self.2)
    }
    #[inline]
    fn from_bits(bits: u64) -> Self {
        ((bits >> 48) as u16, (bits >> 32) as u16, bits as u32)
    }
}

impl Key for Ipv4Addr {
    #[inline]
    fn to_bits(self) -> u64 {
        u64::from(Self::to_bits(self))
    }
    #[inline]
    fn from_bits(bits: u64) -> Self {
        Self::from_bits(bits as u32)
    }
}

/// An `f64` in the total order of IEEE 754 ([`f64::total_cmp`]): -NaN, -inf, ..., -0, +0, ..., inf, NaN.
///
/// # Examples
/// ```
/// use dytis::{DytisMap, TotalF64};
///
/// let map = DytisMap::from([(TotalF64(2.5), 'b'), (TotalF64(-1.0), 'a')]);
/// assert_eq!(map.first_key_value(), Some((TotalF64(-1.0), &'a')));
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(transparent)
)]
pub struct TotalF64(pub f64);

impl Key for TotalF64 {
    #[inline]
    fn to_bits(self) -> u64 {
        let bits = self.0.to_bits();
        // Negative numbers ascend as their magnitude falls.
        if bits >> 63 == 1 {
            !bits
        } else {
            bits | 1 << 63
        }
    }
    #[inline]
    fn from_bits(bits: u64) -> Self {
        Self(f64::from_bits(if bits >> 63 == 1 {
            bits & !(1 << 63)
        } else {
            !bits
        }))
    }
}

impl PartialEq for TotalF64 {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for TotalF64 {}

impl PartialOrd for TotalF64 {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for TotalF64 {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl core::hash::Hash for TotalF64 {
    fn hash<H: core::hash::Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

impl From<f64> for TotalF64 {
    fn from(value: f64) -> Self {
        Self(value)
    }
}

impl From<TotalF64> for f64 {
    fn from(value: TotalF64) -> Self {
        value.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::fmt::Debug;

    fn check<K: Key + Debug>(ascending: &[K]) {
        for pair in ascending.windows(2) {
            assert!(
                pair[0] < pair[1] && pair[0].to_bits() < pair[1].to_bits(),
                "{pair:?}"
            );
        }
        for &key in ascending {
            assert_eq!(K::from_bits(key.to_bits()), key);
        }
    }

    #[test]
    fn every_key_type_keeps_its_order_and_comes_back() {
        check(&[0_u8, 1, 127, 128, 255]);
        check(&[0_u16, 1, u16::MAX]);
        check(&[0_u32, 1, u32::MAX]);
        check(&[0_u64, 1, u64::MAX - 1, u64::MAX]);
        check(&[0_usize, 1, usize::MAX]);
        check(&[i8::MIN, -1, 0, 1, i8::MAX]);
        check(&[i16::MIN, -1, 0, 1, i16::MAX]);
        check(&[i32::MIN, -1, 0, 1, i32::MAX]);
        check(&[i64::MIN, -1, 0, 1, i64::MAX]);
        check(&[isize::MIN, -1, 0, 1, isize::MAX]);
        check(&['\0', 'a', '\u{d7ff}', '\u{e000}', char::MAX]);
        check(&[[0_u8], [1], [255]]);
        check(&[*b"aaa", *b"aab", *b"b\0\0"]);
        check(&[*b"abcdefgh", *b"abcdefgi", [255; 8]]);
        check(&[(0_u32, u32::MAX), (1, 0), (u32::MAX, 1)]);
        check(&[
            (0_u16, 1_u16, u32::MAX),
            (0, 2, 0),
            (1, 0, 0),
            (u16::MAX, u16::MAX, u32::MAX),
        ]);
        check(&[
            Ipv4Addr::new(0, 0, 0, 1),
            Ipv4Addr::new(9, 255, 0, 1),
            Ipv4Addr::BROADCAST,
        ]);
        check(
            &[
                -f64::NAN,
                f64::NEG_INFINITY,
                -1.5,
                -f64::MIN_POSITIVE,
                -0.0,
                0.0,
                1e-300,
                2.0,
                f64::INFINITY,
                f64::NAN,
            ]
            .map(TotalF64),
        );
    }
}
