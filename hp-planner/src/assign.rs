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
/// Of several distributions with the same finish the one is returned that gives the kinds with the most streams (of equals
/// the first) the fewest rounds.
/// Computes in O(k log m) tests of feasibility for k kinds and m micro-batches, mostly in O(k); a test is O(k) when some kind has one stream and
/// at most O(least common multiple of the streams) for two kinds.
pub fn assign(kinds: &[RankKind], micro_batches: u64) -> Option<Vec<Share>> {
    assign_after(kinds, &[], micro_batches)
}

/// [`assign`] for ranks that need `idle` seconds besides their rounds, one number per kind (none means 0).
pub(crate) fn assign_after(
    kinds: &[RankKind],
    idle: &[f64],
    micro_batches: u64,
) -> Option<Vec<Share>> {
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
    if let [kind] = kinds {
        let rounds = micro_batches / u64::from(kind.streams);
        return Some(vec![share(kind, rounds)]);
    }
    let mut search = Bisection {
        kinds,
        idle,
        micro_batches,
        least,
        limits: vec![0; kinds.len()],
        totals: vec![0; kinds.len()],
        order: (0..kinds.len()).collect(),
    };
    // Kinds with few streams last: they fill what the coarse ones leave.
    search
        .order
        .sort_by_key(|&index| std::cmp::Reverse(kinds[index].streams));
    let mut best: Option<(f64, Vec<u64>)> = None;
    let least = search.least_time();
    for index in 0..kinds.len() {
        // Each kind's own multiples, from the last that is too early: mostly the next or the one after it will do.
        let mut low = search.rounds_within(index, least).max(1);
        let mut high = search.most(index);
        let mut step = 1;
        let mut found = false;
        while low <= high {
            let middle = if found {
                low + (high - low) / 2
            } else {
                high.min(low + step - 1)
            };
            let time = search.finish(index, middle);
            if best.as_ref().is_some_and(|(best, _)| time >= *best) {
                (found, high) = (true, middle - 1);
            } else if search.fits(time) {
                best = Some((time, search.totals.clone()));
                (found, high) = (true, middle - 1);
            } else {
                low = middle + 1;
                step *= 2;
            }
        }
    }
    let (_, totals) = best?;
    let shares = kinds.iter().zip(totals);
    Some(shares.map(|(kind, total)| share(kind, total)).collect())
}

/// So many rounds in all, spread over the ranks of a kind as evenly as they go.
fn share(kind: &RankKind, total: u64) -> Share {
    Share {
        rounds: (total / u64::from(kind.ranks)) as u32,
        longer: (total % u64::from(kind.ranks)) as u32,
    }
}

struct Bisection<'a> {
    kinds: &'a [RankKind],
    idle: &'a [f64],
    micro_batches: u64,
    /// Micro-batches of one round on every rank.
    least: u64,
    /// Rounds per rank of each kind within the time in question.
    limits: Vec<u64>,
    /// Rounds in all per kind.
    totals: Vec<u64>,
    /// The order in which kinds are filled.
    order: Vec<usize>,
}

impl Bisection<'_> {
    /// Rounds that a rank of the kind can be given at all.
    fn most(&self, index: usize) -> u64 {
        let kind = &self.kinds[index];
        let others = self.least - u64::from(kind.ranks) * u64::from(kind.streams);
        (self.micro_batches - others) / u64::from(kind.streams)
    }

    /// A time by which not all can be done, or just so: all ranks at work all the time. Lowered a little against rounding.
    fn least_time(&self) -> f64 {
        let (mut rate, mut idle) = (0.0, 0.0);
        for (index, kind) in self.kinds.iter().enumerate() {
            let each = f64::from(kind.ranks) * f64::from(kind.streams) / kind.round;
            rate += each;
            idle += each * self.finish(index, 0);
        }
        (self.micro_batches as f64 + idle) / rate * (1.0 - 1e-9)
    }

    fn finish(&self, index: usize, rounds: u64) -> f64 {
        let idle = self.idle.get(index).copied().unwrap_or(0.0);
        rounds as f64 * self.kinds[index].round + idle
    }

    /// Whether all can be done by `time`; `totals` says how.
    fn fits(&mut self, time: f64) -> bool {
        for index in 0..self.kinds.len() {
            let rounds = self.rounds_within(index, time);
            if rounds == 0 {
                return false;
            }
            self.limits[index] = rounds;
        }
        let (kinds, limits) = (self.kinds, &self.limits);
        let bounds = |index: usize| {
            let ranks = u64::from(kinds[index].ranks);
            let streams = u64::from(kinds[index].streams);
            (ranks, ranks * limits[index], streams)
        };
        fill(&self.order, &bounds, self.micro_batches, &mut self.totals)
    }

    /// Greatest number of rounds of a kind that take no more than `time`, by the same arithmetic as the candidates.
    fn rounds_within(&self, index: usize, time: f64) -> u64 {
        let most = self.most(index);
        if self.finish(index, most) <= time {
            return most;
        }
        let idle = self.finish(index, 0);
        let mut rounds = ((time - idle) / self.kinds[index].round) as u64;
        while rounds > 0 && self.finish(index, rounds) > time {
            rounds -= 1;
        }
        while rounds < most && self.finish(index, rounds + 1) <= time {
            rounds += 1;
        }
        rounds
    }
}

/// Chooses rounds in all per kind, within their bounds of (least, most, micro-batches per round), whose micro-batches sum to
/// `total`.
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
    let attempt = |candidate: u64| {
        result[index] = candidate;
        fill(rest, bounds, total - candidate * streams, result)
    };
    // The interval keeps the remainder within the bounds of the rest. If that is one kind only its residue matters, and
    // residues repeat after a period; with more kinds the bounds restrict the residues near the ends, too.
    let distinct = if rest.len() <= 1 {
        (lcm(streams, period) / streams).min(high - low + 1)
    } else {
        high - low + 1
    };
    (low..low + distinct).any(attempt)
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

    fn finish(kinds: &[RankKind], idle: &[f64], shares: &[Share]) -> f64 {
        let finish = |(kind, share, idle): (&RankKind, &Share, &f64)| {
            f64::from(share.rounds + u32::from(share.longer > 0)) * kind.round + idle
        };
        let ranks = kinds.iter().zip(shares).zip(idle);
        ranks
            .map(|((kind, share), idle)| finish((kind, share, idle)))
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
    fn exhaustive(kinds: &[RankKind], idle: &[f64], micro_batches: u64) -> Option<f64> {
        let ranks: Vec<(RankKind, f64)> = kinds
            .iter()
            .zip(idle)
            .flat_map(|(kind, idle)| std::iter::repeat_n((*kind, *idle), kind.ranks as usize))
            .collect();
        // least[m] = earliest finish of the ranks so far with m micro-batches in all.
        let size = micro_batches as usize + 1;
        let mut least = vec![f64::INFINITY; size];
        least[0] = 0.0;
        for (rank, idle) in ranks {
            let mut next = vec![f64::INFINITY; size];
            for (done, &time) in least.iter().enumerate() {
                for rounds in 1.. {
                    let sum = done + rounds * rank.streams as usize;
                    if sum >= size {
                        break;
                    }
                    next[sum] = next[sum].min(time.max(rounds as f64 * rank.round + idle));
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
            kinds in proptest::collection::vec((1_u32..4, 1_u32..5, 1_u32..30, 0_u32..40), 1..4),
            micro_batches in 1_u64..60,
            waits in any::<bool>(),
        ) {
            let idle: Vec<f64> = kinds
                .iter()
                .map(|kind| if waits { f64::from(kind.3) * 0.07 } else { 0.0 })
                .collect();
            let kinds: Vec<RankKind> = kinds
                .into_iter()
                .map(|(ranks, streams, round, _)| RankKind { ranks, streams, round: f64::from(round) * 0.1 })
                .collect();
            let expected = exhaustive(&kinds, &idle, micro_batches);
            let found = if waits { assign_after(&kinds, &idle, micro_batches) } else { assign(&kinds, micro_batches) };
            prop_assert_eq!(found.is_some(), expected.is_some());
            if let (Some(shares), Some(expected)) = (found, expected) {
                prop_assert_eq!(total(&kinds, &shares), micro_batches);
                prop_assert_eq!(finish(&kinds, &idle, &shares).total_cmp(&expected), std::cmp::Ordering::Equal);
                prop_assert!(shares.iter().zip(&kinds).all(|(share, _)| share.rounds >= 1));
            }
        }
    }
}
