//! A seeded permutation of `0..n` in constant memory.
//!
//! A Feistel network permutes the numbers of w bits, where 2^w is the least power of two that holds n (at least 2^8): each round replaces the halves
//! (L, R) by (R, L xor F(R)), which can be undone whatever F is (Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom
//! functions", 1988). Images outside `0..n` are mapped again until one falls inside ("cycle walking", Black and Rogaway, "Ciphers with arbitrary finite domains",
//! 2002, section 3): still a permutation, fewer than two rounds of it on average from n = 129 on.

use crate::executor::mix;

/// Rounds of the network; four make it indistinguishable from a random permutation for large halves, the rest is for small ones.
const ROUNDS: usize = 8;

/// Least width, so that halves have enough values for F to mix.
const LEAST_BITS: u32 = 8;

/// A permutation of `0..n`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Permutation {
    n: u64,
    /// Bits of the right half in even rounds, of the left one in odd rounds.
    right: u32,
    /// Bits of the other half: as many, or one more.
    left: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation of `0..n` that belongs to `seed`; n is at least 1.
    pub(crate) fn new(n: u64, seed: u64) -> Self {
        let bits = (u64::BITS - (n - 1).leading_zeros()).max(LEAST_BITS);
        let mut state = seed;
        let keys = std::array::from_fn(|_| {
            state = mix(state);
            state
        });
        Self {
            n,
            right: bits / 2,
            left: bits - bits / 2,
            keys,
        }
    }

    /// The image of `i`, which is below n. Computes in O(1) on average.
    pub(crate) fn apply(&self, i: u64) -> u64 {
        let mut x = i;
        loop {
            x = self.network(x);
            if x < self.n {
                return x;
            }
        }
    }

    /// One pass of the network over all bits.
    fn network(&self, x: u64) -> u64 {
        let (mut left_bits, mut right_bits) = (self.left, self.right);
        let (mut left, mut right) = (x >> right_bits, x & mask(right_bits));
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask(left_bits)));
            (left_bits, right_bits) = (right_bits, left_bits);
        }
        // After an even number of rounds the halves have their widths again.
        left << right_bits | right
    }
}

/// `bits` ones; there are at most 32.
fn mask(bits: u32) -> u64 {
    (1 << bits) - 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn is_a_bijection(n in prop_oneof![1..300_u64, 1..20_000_u64], seed: u64) {
            let permutation = Permutation::new(n, seed);
            let mut seen = vec![false; n as usize];
            for i in 0..n {
                let image = permutation.apply(i) as usize;
                prop_assert!(!std::mem::replace(&mut seen[image], true), "{image} twice");
            }
        }

        #[test]
        fn large_domains_keep_to_their_range(n in 1..=u64::MAX, i: u64, seed: u64) {
            let permutation = Permutation::new(n, seed);
            let (a, b) = (i % n, i.wrapping_add(1) % n);
            prop_assert!(permutation.apply(a) < n);
            prop_assert_eq!(permutation.apply(a) == permutation.apply(b), a == b);
        }
    }

    /// Pearson's statistic of `counts` against equal frequencies.
    fn chi_squared(counts: &[u32]) -> f64 {
        let total: u32 = counts.iter().sum();
        let expected = f64::from(total) / counts.len() as f64;
        counts
            .iter()
            .map(|&count| (f64::from(count) - expected).powi(2) / expected)
            .sum()
    }

    /// Asserts that a statistic with `freedom` degrees of freedom is within five standard deviations of its mean.
    fn looks_uniform(counts: &[u32]) {
        let freedom = counts.len() as f64 - 1.0;
        let statistic = chi_squared(counts);
        assert!(
            (statistic - freedom).abs() < 5.0 * (2.0 * freedom).sqrt(),
            "{statistic} at {freedom}"
        );
    }

    #[test]
    fn all_orders_of_a_few_are_equally_frequent() {
        let mut counts = std::collections::BTreeMap::new();
        for seed in 0..24_000 {
            let permutation = Permutation::new(4, seed);
            *counts
                .entry([0, 1, 2, 3].map(|i| permutation.apply(i)))
                .or_insert(0_u32) += 1;
        }
        assert_eq!(counts.len(), 24);
        looks_uniform(&counts.into_values().collect::<Vec<_>>());
    }

    #[test]
    fn every_sample_is_equally_frequent_at_every_position() {
        let n = 37;
        let mut counts = vec![0_u32; (n * n) as usize];
        for seed in 0..20_000 {
            let permutation = Permutation::new(n, seed);
            for i in 0..n {
                counts[(i * n + permutation.apply(i)) as usize] += 1;
            }
        }
        looks_uniform(&counts);
    }

    #[test]
    fn neighbours_are_torn_apart() {
        let n = 100_003;
        let mut distances = vec![0_u32; 64];
        for seed in 0..3 {
            let permutation = Permutation::new(n, seed);
            for i in 0..n - 1 {
                let distance = (permutation.apply(i + 1) + n - permutation.apply(i)) % n;
                distances[(distance * 64 / n) as usize] += 1;
            }
        }
        looks_uniform(&distances);
    }
}
