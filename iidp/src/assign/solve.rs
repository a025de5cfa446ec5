//! The search for the least time at which the batch can be served exactly.

use std::collections::{BinaryHeap, HashMap};
use std::ops::RangeInclusive;

use super::RankCost;

/// Critical times that are sorted at once; a bracket with more of them is bisected.
const FEW: usize = 256;

/// Critical times above the lower bound that are tried one by one before the whole range is bisected.
const NEXT: usize = 16;

/// Ranks of equal cost.
#[derive(Debug)]
struct Kind {
    overhead: f64,
    /// Seconds of a round, at index v - 1 for v workers.
    rounds: Vec<f64>,
    ranks: usize,
}

impl Kind {
    fn seconds(&self, v: usize, steps: usize) -> f64 {
        self.overhead + steps as f64 * self.rounds[v - 1]
    }

    /// The most rounds, at most `limit`, that v workers finish within `time`.
    fn steps(&self, v: usize, time: f64, limit: usize) -> usize {
        let estimate = ((time - self.overhead) / self.rounds[v - 1]).max(0.0);
        // The division may be off by one where the time is exactly that of a number of rounds.
        let mut steps = (estimate as usize).min(limit);
        while steps > 0 && self.seconds(v, steps) > time {
            steps -= 1;
        }
        while steps < limit && self.seconds(v, steps + 1) <= time {
            steps += 1;
        }
        steps
    }

    fn workers(&self) -> RangeInclusive<usize> {
        1..=self.rounds.len()
    }
}

/// What all ranks together can do within some time.
#[derive(Debug)]
struct Sweep {
    /// Most micro-batches.
    capacity: usize,
    /// Number of critical times up to this one, equal ones of one kind counted once.
    criticals: usize,
}

/// What one kind of rank can serve within some time.
#[derive(Debug)]
struct Reach {
    /// Most rounds, at index v - 1 for v workers.
    steps: Vec<usize>,
    /// Most micro-batches.
    most: usize,
}

impl Reach {
    fn serves(&self, served: usize) -> bool {
        self.steps
            .iter()
            .zip(1..)
            .any(|(steps, v)| served.is_multiple_of(v) && served / v <= *steps)
    }

    /// The largest number below `served` that can be served.
    fn below(&self, served: usize) -> usize {
        self.steps
            .iter()
            .zip(1..)
            .map(|(steps, v)| ((served - 1) / v).min(*steps) * v)
            .max()
            .unwrap_or(0)
    }
}

/// A batch to be spread over ranks.
#[derive(Debug)]
pub(super) struct Problem {
    /// Micro-batches; at least one per rank.
    batch: usize,
    kinds: Vec<Kind>,
    /// Kind of each rank.
    kind_of: Vec<usize>,
}

impl Problem {
    pub(super) fn new(batch: usize, costs: &[RankCost]) -> Self {
        let mut known = HashMap::new();
        let mut kinds: Vec<Kind> = Vec::new();
        let kind_of = costs
            .iter()
            .map(|cost| {
                let values = [cost.micro_batch_seconds, cost.overhead_seconds];
                let key: Vec<u64> = values
                    .iter()
                    .chain(&cost.efficiency)
                    .map(|x| x.to_bits())
                    .collect();
                let kind = *known.entry(key).or_insert_with(|| {
                    let rounds = cost
                        .efficiency
                        .iter()
                        .map(|e| cost.micro_batch_seconds / e)
                        .collect();
                    kinds.push(Kind {
                        overhead: cost.overhead_seconds,
                        rounds,
                        ranks: 0,
                    });
                    kinds.len() - 1
                });
                kinds[kind].ranks += 1;
                kind
            })
            .collect();
        Self {
            batch,
            kinds,
            kind_of,
        }
    }

    /// Micro-batches of each rank in a fastest assignment.
    pub(super) fn solve(&self) -> Vec<usize> {
        let first = self
            .kinds
            .iter()
            .map(|kind| kind.seconds(1, 1))
            .fold(0.0, f64::max);
        let bound = if self.sweep(first).capacity >= self.batch {
            first
        } else {
            let (least, ample) = self.divisible(first, Kind::workers);
            self.least(least, ample, |_, sweep| sweep.capacity >= self.batch)
        };
        let mut time = bound;
        for _ in 0..NEXT {
            if let Some(served) = self.serve(time) {
                return served;
            }
            time = self.after(time);
        }
        // With one worker per rank every number up to the most can be served, so there is always an answer.
        let (_, ample) = self.divisible(time, |_| 1..=1);
        let single = self.least(bound, ample, |time, _| self.serve(time).is_some());
        self.serve(single)
            .expect("single workers serve every number up to their capacity")
    }

    /// What can be done within `time`.
    fn sweep(&self, time: f64) -> Sweep {
        let mut sweep = Sweep {
            capacity: 0,
            criticals: 0,
        };
        for kind in &self.kinds {
            let mut most = 0;
            for v in kind.workers() {
                let steps = kind.steps(v, time, self.batch);
                most = most.max(v * steps);
                sweep.criticals += steps;
            }
            sweep.capacity = sweep.capacity.saturating_add(kind.ranks * most);
        }
        sweep
    }

    /// A time from `first` on below which the capacity cannot suffice, and one at which it does, with the given numbers of workers: that of
    /// divisible work, less and more than the rounding of these sums, and a round later for what does not divide.
    fn divisible(
        &self,
        first: f64,
        workers: impl Fn(&Kind) -> RangeInclusive<usize>,
    ) -> (f64, f64) {
        let (mut work, mut rate, mut longest) = (self.batch as f64, 0.0, 0.0_f64);
        for kind in &self.kinds {
            let speed = |v: usize| v as f64 / kind.rounds[v - 1];
            let best = workers(kind)
                .max_by(|a, b| speed(*a).total_cmp(&speed(*b)))
                .unwrap_or(1);
            let speed = kind.ranks as f64 * speed(best);
            work += kind.overhead * speed;
            rate += speed;
            longest = longest.max(kind.rounds[best - 1]);
        }
        let time = work / rate;
        // From `first` on every rank's time is above its overhead, as these sums suppose.
        (
            first.max(time * (1.0 - 1e-9)),
            (first.max(time) + longest) * (1.0 + 1e-9),
        )
    }

    /// The first critical time after `time`.
    fn after(&self, time: f64) -> f64 {
        let next = |kind: &Kind| {
            let next = |v| kind.seconds(v, kind.steps(v, time, self.batch) + 1);
            kind.workers().map(next).fold(f64::INFINITY, f64::min)
        };
        self.kinds.iter().map(next).fold(f64::INFINITY, f64::min)
    }

    /// The least critical time above `low` and up to `high` at which `holds`; it does at `high`, and once it does it does for all
    /// later times.
    fn least(&self, mut low: f64, mut high: f64, holds: impl Fn(f64, &Sweep) -> bool) -> f64 {
        let (mut below, mut above) = (self.sweep(low).criticals, self.sweep(high).criticals);
        while above - below > FEW {
            let middle = f64::midpoint(low, high);
            if middle <= low || middle >= high {
                break;
            }
            let sweep = self.sweep(middle);
            if holds(middle, &sweep) {
                (high, above) = (middle, sweep.criticals);
            } else {
                (low, below) = (middle, sweep.criticals);
            }
        }
        let mut times: Vec<f64> = Vec::new();
        for kind in &self.kinds {
            for v in kind.workers() {
                let steps = kind.steps(v, low, self.batch) + 1..=kind.steps(v, high, self.batch);
                times.extend(steps.map(|steps| kind.seconds(v, steps)));
            }
        }
        times.sort_by(f64::total_cmp);
        times.dedup();
        let index = times.partition_point(|time| !holds(*time, &self.sweep(*time)));
        times.get(index).copied().unwrap_or(high)
    }

    /// Micro-batches of each rank that add up to the batch, all done within `time`, if there are any.
    fn serve(&self, time: f64) -> Option<Vec<usize>> {
        let reaches: Vec<Reach> = self
            .kinds
            .iter()
            .map(|kind| {
                let steps: Vec<usize> = kind
                    .workers()
                    .map(|v| kind.steps(v, time, self.batch))
                    .collect();
                let most = steps
                    .iter()
                    .zip(1..)
                    .map(|(steps, v)| steps * v)
                    .max()
                    .unwrap_or(0);
                Reach { steps, most }
            })
            .collect();
        let served: Vec<usize> = self
            .kind_of
            .iter()
            .map(|kind| reaches[*kind].most)
            .collect();
        let total = served.iter().copied().fold(0, usize::saturating_add);
        if total < self.batch || served.contains(&0) {
            return None;
        }
        let surplus = total - self.batch;
        self.take_off_last(&reaches, served.clone(), surplus)
            .or_else(|| self.take_off_exactly(&reaches, served, surplus))
    }

    /// Takes the surplus off, a step at a time, from the rank that finishes last among those where a step is not too much. What then remains is left
    /// to [`take_off_exactly`](Self::take_off_exactly).
    fn take_off_last(
        &self,
        reaches: &[Reach],
        mut served: Vec<usize>,
        mut surplus: usize,
    ) -> Option<Vec<usize>> {
        // A surplus this large comes from a few ranks with far more to do than there are ranks: taking it off step by step would be slow.
        if surplus > 64 * served.len() + FEW {
            return None;
        }
        let finish = |rank: usize, served: usize| {
            let kind = &self.kinds[self.kind_of[rank]];
            let fitting = kind.workers().filter(|v| served.is_multiple_of(*v));
            Time(
                fitting
                    .map(|v| kind.seconds(v, served / v))
                    .fold(f64::INFINITY, f64::min),
            )
        };
        let mut last: BinaryHeap<_> = served
            .iter()
            .enumerate()
            .map(|(rank, served)| (finish(rank, *served), rank))
            .collect();
        while surplus > 0 {
            let Some((_, rank)) = last.pop() else { break };
            let below = reaches[self.kind_of[rank]].below(served[rank]);
            let step = served[rank] - below;
            if below > 0 && step <= surplus {
                served[rank] = below;
                surplus -= step;
                last.push((finish(rank, below), rank));
            }
        }
        if surplus == 0 {
            Some(served)
        } else {
            self.take_off_exactly(reaches, served, surplus)
        }
    }

    /// Takes exactly the surplus off, if that is possible by lowering ranks from what they serve now: the subset-sum over what each rank can give up.
    fn take_off_exactly(
        &self,
        reaches: &[Reach],
        mut served: Vec<usize>,
        surplus: usize,
    ) -> Option<Vec<usize>> {
        // sums[r]: what the ranks before r can give up together.
        let mut sums = vec![Bits::zero(surplus)];
        while !sums.last()?.contains(surplus) {
            let rank = sums.len() - 1;
            let now = *served.get(rank)?;
            let before = &sums[rank];
            let mut sum = before.clone();
            for (steps, v) in reaches[self.kind_of[rank]].steps.iter().zip(1..) {
                let steps = (now / v).min(*steps);
                if steps > 0 {
                    sum.add_progression(before, now - steps * v, v, steps);
                }
            }
            sums.push(sum);
        }
        let mut rest = surplus;
        for rank in (0..sums.len() - 1).rev() {
            let reach = &reaches[self.kind_of[rank]];
            let gives = |given: usize| {
                sums[rank].contains(rest - given)
                    && (given == 0 || reach.serves(served[rank] - given))
            };
            let given = (0..served[rank].min(rest + 1)).find(|given| gives(*given))?;
            served[rank] -= given;
            rest -= given;
        }
        Some(served)
    }
}

/// A finite time that can be compared.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Time(f64);

impl Eq for Time {}

impl Ord for Time {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// A set of numbers from 0 to some limit.
#[derive(Debug, Clone)]
struct Bits {
    words: Vec<u64>,
    limit: usize,
}

impl Bits {
    /// The set of 0.
    fn zero(limit: usize) -> Self {
        let mut words = vec![0; limit / 64 + 1];
        words[0] = 1;
        Self { words, limit }
    }

    fn contains(&self, number: usize) -> bool {
        self.words[number / 64] >> (number % 64) & 1 == 1
    }

    /// Adds every `x + offset + i step` for x in `from` and i in `0..count`. Computes in O(limit log(count) / 64).
    fn add_progression(&mut self, from: &Self, offset: usize, step: usize, count: usize) {
        if offset > self.limit {
            return;
        }
        let mut shifted = Self {
            words: vec![0; self.words.len()],
            limit: self.limit,
        };
        shifted.add_shifted(&from.words, offset);
        let count = count.min((self.limit - offset) / step + 1);
        let mut covered = 1;
        while covered < count {
            let more = covered.min(count - covered);
            let copy = shifted.words.clone();
            shifted.add_shifted(&copy, more * step);
            covered += more;
        }
        for (word, other) in self.words.iter_mut().zip(shifted.words) {
            *word |= other;
        }
    }

    fn add_shifted(&mut self, from: &[u64], by: usize) {
        let (words, bits) = (by / 64, by % 64);
        for (i, word) in self.words.iter_mut().enumerate().skip(words) {
            let i = i - words;
            let carried = if bits > 0 && i > 0 {
                from[i - 1] >> (64 - bits)
            } else {
                0
            };
            *word |= from[i] << bits | carried;
        }
    }
}
