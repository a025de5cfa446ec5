//! Rank of a key in a short sorted array: the one place that knows about instruction sets.
//!
//! Keys are kept as `i64` with the sign bit flipped ([`flip`]), because AVX2 and NEON compare signed 64-bit lanes only (NEON
//! has both, AVX2 has not). A rank is the number of keys that are smaller, counted over the whole array without a branch:
//! places past the last key hold [`PAD`], which is smaller than no key, so that arrays need no length here, and every
//! key, the largest one included, stays valid.
//!
//! The structure's hot paths are generic over [`Arch`], `#[inline(always)]`, and instantiated once per instruction set
//! inside a `#[target_feature]` function: one predictable branch per operation, none per search, and no call through a
//! pointer.

/// What an unused place of a key array holds.
pub(crate) const PAD: i64 = i64::MAX;

/// The order-preserving map from key bits to stored form.
#[inline(always)]
pub(crate) const fn flip(bits: u64) -> i64 {
    (bits ^ (1 << 63)) as i64
}

/// Inverse of [`flip`].
#[inline(always)]
pub(crate) const fn unflip(key: i64) -> u64 {
    key as u64 ^ (1 << 63)
}

/// An instruction set that can rank keys.
pub(crate) trait Arch {
    /// Number of the `N` keys at `keys` that are smaller than `key`; `N` is a multiple of 8.
    ///
    /// # Safety
    /// `keys` is valid for reading `N` keys, and the processor has the instruction set.
    unsafe fn rank<const N: usize>(keys: *const i64, key: i64) -> usize;
}

/// Plain code, for processors without a vector path and for the tests.
pub(crate) struct Scalar;

impl Arch for Scalar {
    #[inline(always)]
    unsafe fn rank<const N: usize>(keys: *const i64, key: i64) -> usize {
        // SAFETY: the caller vouches for `N` readable keys.
        let keys = unsafe { core::slice::from_raw_parts(keys, N) };
        keys.iter().map(|&k| usize::from(k < key)).sum()
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Arch;
    use core::arch::x86_64::{
        __m256i, __m512i, _mm_add_epi64, _mm_cvtsi128_si64, _mm_unpackhi_epi64, _mm256_add_epi64,
        _mm256_castsi256_pd, _mm256_castsi256_si128, _mm256_cmpgt_epi64, _mm256_extracti128_si256,
        _mm256_loadu_si256, _mm256_movemask_pd, _mm256_set1_epi64x, _mm256_setzero_si256,
        _mm256_sub_epi64, _mm512_cmplt_epi64_mask, _mm512_loadu_si512, _mm512_set1_epi64,
    };

    /// 4 keys per comparison.
    pub(crate) struct Avx2;

    impl Arch for Avx2 {
        #[inline(always)]
        #[expect(clippy::cast_ptr_alignment, reason = "the loads are unaligned ones")]
        unsafe fn rank<const N: usize>(keys: *const i64, key: i64) -> usize {
            // SAFETY: AVX2 is there and `N` keys are readable, says the caller; every load lies within them.
            unsafe {
                let load = |i: usize| _mm256_loadu_si256(keys.add(i).cast::<__m256i>());
                let key = _mm256_set1_epi64x(key);
                if N == 8 {
                    let low =
                        _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpgt_epi64(key, load(0))));
                    let high =
                        _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpgt_epi64(key, load(4))));
                    return (low | high << 4).count_ones() as usize;
                }
                // A true lane is -1, so subtracting counts; two sums break the dependency.
                let (mut even, mut odd) = (_mm256_setzero_si256(), _mm256_setzero_si256());
                let mut i = 0;
                while i < N {
                    even = _mm256_sub_epi64(even, _mm256_cmpgt_epi64(key, load(i)));
                    odd = _mm256_sub_epi64(odd, _mm256_cmpgt_epi64(key, load(i + 4)));
                    i += 8;
                }
                let sum = _mm256_add_epi64(even, odd);
                let sum = _mm_add_epi64(
                    _mm256_castsi256_si128(sum),
                    _mm256_extracti128_si256::<1>(sum),
                );
                (_mm_cvtsi128_si64(sum) + _mm_cvtsi128_si64(_mm_unpackhi_epi64(sum, sum))) as usize
            }
        }
    }

    /// 8 keys per comparison.
    pub(crate) struct Avx512;

    impl Arch for Avx512 {
        #[inline(always)]
        #[expect(clippy::cast_ptr_alignment, reason = "the loads are unaligned ones")]
        unsafe fn rank<const N: usize>(keys: *const i64, key: i64) -> usize {
            // SAFETY: AVX-512F is there and `N` keys are readable, says the caller; every load lies within them.
            unsafe {
                let key = _mm512_set1_epi64(key);
                let mut mask = 0_u64;
                let mut i = 0;
                while i < N {
                    let lanes = _mm512_loadu_si512(keys.add(i).cast::<__m512i>());
                    mask |= u64::from(_mm512_cmplt_epi64_mask(lanes, key)) << i;
                    i += 8;
                }
                mask.count_ones() as usize
            }
        }
    }
}

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::Neon;

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use super::Arch;
    use core::arch::aarch64::{
        vaddq_u64, vaddvq_u64, vcgtq_s64, vdupq_n_s64, vdupq_n_u64, vld1q_s64, vsubq_u64,
    };

    /// 2 keys per comparison; every 64-bit Arm processor has it.
    pub(crate) struct Neon;

    impl Arch for Neon {
        #[inline(always)]
        unsafe fn rank<const N: usize>(keys: *const i64, key: i64) -> usize {
            // SAFETY: NEON is part of the base architecture, and the caller vouches for `N` readable keys.
            unsafe {
                let key = vdupq_n_s64(key);
                let (mut even, mut odd) = (vdupq_n_u64(0), vdupq_n_u64(0));
                let mut i = 0;
                while i < N {
                    even = vsubq_u64(even, vcgtq_s64(key, vld1q_s64(keys.add(i))));
                    odd = vsubq_u64(odd, vcgtq_s64(key, vld1q_s64(keys.add(i + 2))));
                    i += 4;
                }
                vaddvq_u64(vaddq_u64(even, odd)) as usize
            }
        }
    }
}

/// The instruction sets among which a run chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    not(all(target_arch = "x86_64", feature = "std")),
    allow(
        dead_code,
        reason = "only x86-64 has more than one path, and only std can choose at run time"
    )
)]
pub(crate) enum Level {
    Base,
    Avx2,
    Avx512,
}

/// The best instruction set of this processor: a constant where the build says so, else looked up (a cached load).
#[inline(always)]
pub(crate) fn level() -> Level {
    #[cfg(all(
        target_arch = "x86_64",
        target_feature = "avx512f",
        target_feature = "avx2",
        target_feature = "popcnt"
    ))]
    return Level::Avx512;
    #[cfg(all(
        target_arch = "x86_64",
        target_feature = "avx2",
        target_feature = "popcnt",
        not(target_feature = "avx512f")
    ))]
    return Level::Avx2;
    #[cfg(all(
        target_arch = "x86_64",
        feature = "std",
        not(all(target_feature = "avx2", target_feature = "popcnt"))
    ))]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("popcnt")
    {
        return if std::arch::is_x86_feature_detected!("avx512f") {
            Level::Avx512
        } else {
            Level::Avx2
        };
    }
    #[allow(unreachable_code, reason = "some builds have answered above")]
    Level::Base
}

/// The path of [`Level::Base`]: what every processor of the target has.
#[cfg(not(target_arch = "aarch64"))]
pub(crate) type Base = Scalar;
#[cfg(target_arch = "aarch64")]
pub(crate) type Base = Neon;

/// Asks for the cache line at `address`; a hint without effect on meaning, valid for any address.
#[inline(always)]
pub(crate) fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, and SSE is part of x86-64.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<A: Arch, const N: usize>() {
        for len in 0..=N {
            let mut keys = [PAD; N];
            for (i, key) in keys[..len].iter_mut().enumerate() {
                *key = flip((i as u64) * 10);
            }
            for probe in (0..(N as u64) * 10 + 20).chain([u64::MAX - 1, u64::MAX]) {
                let expected = keys[..len].iter().filter(|&&k| k < flip(probe)).count();
                // SAFETY: `N` keys, and the caller has checked the processor.
                let rank = unsafe { A::rank::<N>(keys.as_ptr(), flip(probe)) };
                assert_eq!(rank, expected, "{len} {probe}");
            }
        }
    }

    #[test]
    fn every_path_counts_alike() {
        check::<Scalar, 8>();
        check::<Scalar, 32>();
        check::<Base, 16>();
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2,popcnt")]
            fn avx2() {
                check::<Avx2, 8>();
                check::<Avx2, 16>();
                check::<Avx2, 32>();
            }
            #[target_feature(enable = "avx512f,avx2,popcnt")]
            fn avx512() {
                check::<Avx512, 8>();
                check::<Avx512, 16>();
                check::<Avx512, 32>();
            }
            if level() != Level::Base {
                // SAFETY: `level` has found the instruction set.
                unsafe { avx2() };
            }
            if level() == Level::Avx512 {
                // SAFETY: `level` has found the instruction set.
                unsafe { avx512() };
            }
        }
    }

    #[test]
    fn stored_form_keeps_the_order() {
        let bits = [0, 1, u64::MAX / 2, u64::MAX / 2 + 1, u64::MAX - 1, u64::MAX];
        assert!(bits.windows(2).all(|w| flip(w[0]) < flip(w[1])));
        assert!(bits.iter().all(|&b| unflip(flip(b)) == b));
    }
}
