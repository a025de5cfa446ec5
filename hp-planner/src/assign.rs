//! Distribution of the micro-batches of a step over ranks of unequal speed, exactly.
//!
//! Ranks come in kinds; a rank of kind g runs `streams_g` virtual workers and needs `round_g` seconds for one round of
//! `streams_g` micro-batches. Wanted are rounds per rank, each at least one, whose micro-batches sum to the given number,
//! such that the slowest rank finishes as early as possible. The finish time is one of the values `a * round_g`, and what fits
//! into a time fits into every longer one, so the least is found by bisection over these values with an exact test of
//! feasibility.

/// Equal ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankKind {
    /// Number of ranks, at least 1.
    pub ranks: u32,
    /// Virtual workers per rank, at least 1: micro-batches per round.
    pub streams: u32,
    /// Seconds per round.
    pub round: f64,
}

/// Rounds of one kind of rank: `longer` ranks run `rounds + 1`, the others `rounds`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Rounds of the ranks that run fewer.
    pub rounds: u32,
    /// Ranks that run one more.
    pub longer: u32,
}

/// The distribution of `micro_batches` over `kinds` with the earliest finish, or `None` if none sums up exactly.
///
/// Which of several distributions with the same finish is returned depends on the arguments only.
/// Computes in O(k log m) tests of feasibility for k kinds and m micro-batches; a test is O(k) when some kind has one stream and
/// at most O(least common multiple of the streams) for two kinds.
pub fn assign(kinds: &[RankKind], micro_batches: u64) -> Option<Vec<Share>> {
    let least: u64 = kinds
        .iter()
        .map(|kind| u64::from(kind.ranks) * u64::from(kind.streams))
        .sum();
    let common = kinds
        .iter()
        .fold(0, |common, kind| gcd(common, u64::from(kind.streams)));
    if kinds.is_empty() || micro_batches < least || !micro_batches.is_multiple_of(common) {
        return None;
    }
    // Rounds that a rank of the kind can be given at all.
    let most = |kind: &RankKind| {
        let others = least - u64::from(kind.ranks) * u64::from(kind.streams);
        (micro_batches - others) / u64::from(kind.streams)
    };
    // Bisect each kind's own multiples for the least finish time of this kind that is feasible for all.
    let fits = |time: f64| -> Option<Vec<u64>> {
        let mut limits = Vec::with_capacity(kinds.len());
        for kind in kinds {
            let rounds = rounds_within(kind.round, time, most(kind));
            if rounds == 0 {
                return None;
            }
            limits.push(rounds);
        }
        units(kinds, &limits, micro_batches)
    };
    let mut best: Option<(f64, Vec<u64>)> = None;
    for kind in kinds {
        let (mut low, mut high) = (1, most(kind));
        while low <= high {
            let middle = low + (high - low) / 2;
            let time = middle as f64 * kind.round;
            if best.as_ref().is_some_and(|(least, _)| time >= *least) {
                high = middle - 1;
                continue;
            }
            match fits(time) {
                Some(found) => {
                    best = Some((time, found));
                    high = middle - 1;
                }
                None => low = middle + 1,
            }
        }
    }
    let (_, totals) = best?;
    Some(
        kinds
            .iter()
            .zip(totals)
            .map(|(kind, total)| Share {
                rounds: (total / u64::from(kind.ranks)) as u32,
                longer: (total % u64::from(kind.ranks)) as u32,
            })
            .collect(),
    )
}

/// Greatest number of rounds, at most `most`, that take no more than `time`, by the same product as the candidates.
fn rounds_within(round: f64, time: f64, most: u64) -> u64 {
    if most as f64 * round <= time {
        return most;
    }
    let mut rounds = (time / round) as u64;
    while rounds > 0 && rounds as f64 * round > time {
        rounds -= 1;
    }
    while rounds < most && (rounds + 1) as f64 * round <= time {
        rounds += 1;
    }
    rounds
}

/// Rounds in all per kind, between one and `limits` per rank, whose micro-batches sum to `total`.
fn units(kinds: &[RankKind], limits: &[u64], total: u64) -> Option<Vec<u64>> {
    // Kinds with few streams last: they fill what the coarse ones leave.
    let mut order: Vec<usize> = (0..kinds.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(kinds[index].streams));
    let bounds = |index: usize| {
        let ranks = u64::from(kinds[index].ranks);
        (
            ranks,
            ranks * limits[index],
            u64::from(kinds[index].streams),
        )
    };
    let mut result = vec![0; kinds.len()];
    fill(&order, &bounds, total, &mut result).then_some(result)
}

fn fill(
    order: &[usize],
    bounds: &impl Fn(usize) -> (u64, u64, u64),
    total: u64,
    result: &mut [u64],
) -> bool {
    let Some((&index, rest)) = order.split_first() else {
        return total == 0;
    };
    let (least, most, streams) = bounds(index);
    let (mut rest_least, mut rest_most, mut period) = (0, 0, 1);
    for &other in rest {
        let (least, most, streams) = bounds(other);
        rest_least += least * streams;
        rest_most += most * streams;
        period = lcm(period, streams);
    }
    // What remains for the others must lie between their bounds.
    if total < rest_least + least * streams || total > rest_most + most * streams {
        return false;
    }
    let low = least.max(total.saturating_sub(rest_most).div_ceil(streams));
    let high = most.min((total - rest_least) / streams);
    if low > high {
        return false;
    }
    let mut attempt = |candidate: u64| {
        result[index] = candidate;
        fill(rest, bounds, total - candidate * streams, result)
    };
    if rest.len() <= 1 {
        // The interval keeps the remainder within the last kind's bounds, so that only its residue matters, and residues
        // repeat after a period.
        let distinct = (lcm(streams, period) / streams).min(high - low + 1);
        return (low..low + distinct).any(attempt);
    }
    // With more kinds the bounds restrict the residues near the ends: the whole interval is tried, from the middle where
    // the others are freest.
    let middle = low + (high - low) / 2;
    (0..=high - middle).any(|offset| {
        attempt(middle + offset)
            || middle
                .checked_sub(offset)
                .is_some_and(|candidate| candidate >= low && attempt(candidate))
    })
}

fn gcd(left: u64, right: u64) -> u64 {
    let (mut a, mut b) = (left, right);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

fn lcm(left: u64, right: u64) -> u64 {
    left / gcd(left, right) * right
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn finish(kinds: &[RankKind], shares: &[Share]) -> f64 {
        kinds
            .iter()
            .zip(shares)
            .map(|(kind, share)| f64::from(share.rounds + u32::from(share.longer > 0)) * kind.round)
            .fold(0.0, f64::max)
    }

    fn total(kinds: &[RankKind], shares: &[Share]) -> u64 {
        kinds
            .iter()
            .zip(shares)
            .map(|(kind, share)| {
                u64::from(kind.streams)
                    * (u64::from(kind.ranks) * u64::from(share.rounds) + u64::from(share.longer))
            })
            .sum()
    }

    /// Least finish time over all distributions, rank by rank.
    fn exhaustive(kinds: &[RankKind], micro_batches: u64) -> Option<f64> {
        let ranks: Vec<RankKind> = kinds
            .iter()
            .flat_map(|kind| std::iter::repeat_n(*kind, kind.ranks as usize))
            .collect();
        // least[m] = earliest finish of the ranks so far with m micro-batches in all.
        let size = micro_batches as usize + 1;
        let mut least = vec![f64::INFINITY; size];
        least[0] = 0.0;
        for rank in ranks {
            let mut next = vec![f64::INFINITY; size];
            for (done, &time) in least.iter().enumerate() {
                for rounds in 1.. {
                    let sum = done + rounds * rank.streams as usize;
                    if sum >= size {
                        break;
                    }
                    next[sum] = next[sum].min(time.max(rounds as f64 * rank.round));
                }
            }
            least = next;
        }
        least.last().copied().filter(|time| time.is_finite())
    }

    #[test]
    fn faster_ranks_get_more() {
        let kinds = [
            RankKind {
                ranks: 2,
                streams: 1,
                round: 1.0,
            },
            RankKind {
                ranks: 2,
                streams: 1,
                round: 2.0,
            },
        ];
        let shares = assign(&kinds, 12).unwrap();
        assert_eq!(
            shares[0],
            Share {
                rounds: 4,
                longer: 0
            }
        );
        assert_eq!(
            shares[1],
            Share {
                rounds: 2,
                longer: 0
            }
        );
        assert!(assign(&kinds, 3).is_none());
    }

    #[test]
    fn parity_can_make_a_number_unreachable() {
        let kinds = [
            RankKind {
                ranks: 1,
                streams: 2,
                round: 1.0,
            },
            RankKind {
                ranks: 2,
                streams: 4,
                round: 1.0,
            },
        ];
        assert!(assign(&kinds, 1_000_001).is_none());
        assert_eq!(
            total(&kinds, &assign(&kinds, 1_000_000).unwrap()),
            1_000_000
        );
    }

    proptest! {
        #[test]
        fn equals_exhaustive_search(
            kinds in proptest::collection::vec((1_u32..4, 1_u32..5, 1_u32..30), 1..4),
            micro_batches in 1_u64..60,
        ) {
            let kinds: Vec<RankKind> = kinds
                .into_iter()
                .map(|(ranks, streams, round)| RankKind { ranks, streams, round: f64::from(round) * 0.1 })
                .collect();
            let expected = exhaustive(&kinds, micro_batches);
            let found = assign(&kinds, micro_batches);
            prop_assert_eq!(found.is_some(), expected.is_some());
            if let (Some(shares), Some(expected)) = (found, expected) {
                prop_assert_eq!(total(&kinds, &shares), micro_batches);
                prop_assert_eq!(finish(&kinds, &shares).total_cmp(&expected), std::cmp::Ordering::Equal);
                prop_assert!(shares.iter().zip(&kinds).all(|(share, _)| share.rounds >= 1));
            }
        }
    }
}
