//! Number types that gradients and accumulators come in.

mod sealed {
    #[expect(
        unnameable_types,
        reason = "seals the traits: no other crate may implement them"
    )]
    pub trait Sealed {}
}

/// A number that a gradient consists of: `f32`, `f64`, and with feature `half` also `bf16` and `f16`.
pub trait Element: sealed::Sealed + Copy + Send + Sync + std::fmt::Debug + 'static {
    /// The same value as `f64`; exact for every implementor.
    fn to_f64(self) -> f64;
    /// The nearest `f32`.
    fn to_f32(self) -> f32;
}

/// A number that gradients are accumulated in: `f32` or `f64`.
pub trait AccumulatorElement: Element {
    /// Zero, what a fresh accumulator holds.
    const ZERO: Self;
    /// Converts a weight.
    fn from_f64(value: f64) -> Self;
    /// `self + gradient`, rounded once, as plain accumulation in this type does it.
    #[must_use]
    fn plus<G: Element>(self, gradient: G) -> Self;
    /// `self + weight * gradient`, product and sum each rounded to this type.
    #[must_use]
    fn plus_scaled<G: Element>(self, weight: Self, gradient: G) -> Self;
}

impl sealed::Sealed for f32 {}
impl Element for f32 {
    #[inline]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    #[inline]
    fn to_f32(self) -> f32 {
        self
    }
}
impl AccumulatorElement for f32 {
    const ZERO: Self = 0.0;
    #[inline]
    fn from_f64(value: f64) -> Self {
        value as f32
    }
    #[inline]
    fn plus<G: Element>(self, gradient: G) -> Self {
        self + gradient.to_f32()
    }
    #[inline]
    fn plus_scaled<G: Element>(self, weight: Self, gradient: G) -> Self {
        self + weight * gradient.to_f32()
    }
}

impl sealed::Sealed for f64 {}
impl Element for f64 {
    #[inline]
    fn to_f64(self) -> f64 {
        self
    }
    #[inline]
    fn to_f32(self) -> f32 {
        self as f32
    }
}
impl AccumulatorElement for f64 {
    const ZERO: Self = 0.0;
    #[inline]
    fn from_f64(value: f64) -> Self {
        value
    }
    #[inline]
    fn plus<G: Element>(self, gradient: G) -> Self {
        self + gradient.to_f64()
    }
    #[inline]
    fn plus_scaled<G: Element>(self, weight: Self, gradient: G) -> Self {
        self + weight * gradient.to_f64()
    }
}

#[cfg(feature = "half")]
mod half_types {
    use super::{Element, sealed};
    use half::{bf16, f16};

    impl sealed::Sealed for bf16 {}
    impl Element for bf16 {
        #[inline]
        fn to_f64(self) -> f64 {
            f64::from(bf16::to_f32(self))
        }
        #[inline]
        fn to_f32(self) -> f32 {
            bf16::to_f32(self)
        }
    }

    impl sealed::Sealed for f16 {}
    impl Element for f16 {
        #[inline]
        fn to_f64(self) -> f64 {
            f64::from(f16::to_f32(self))
        }
        #[inline]
        fn to_f32(self) -> f32 {
            f16::to_f32(self)
        }
    }
}
