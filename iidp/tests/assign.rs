//! The assignment of workers is the best there is.

use iidp::{Error, RankCost, assign_workers};
use proptest::prelude::*;

/// Least seconds in which a rank serves `served` micro-batches.
fn best(cost: &RankCost, served: usize) -> f64 {
    (1..=cost.max_virtual_workers())
        .filter(|v| served.is_multiple_of(*v))
        .map(|v| cost.seconds(v, served / v))
        .fold(f64::INFINITY, f64::min)
}

/// Tries every way to give each rank at least one micro-batch.
fn brute_force(costs: &[RankCost], batch: usize) -> f64 {
    match costs {
        [last] => best(last, batch),
        [first, rest @ ..] => (1..=batch - rest.len())
            .map(|served| best(first, served).max(brute_force(rest, batch - served)))
            .fold(f64::INFINITY, f64::min),
        [] => unreachable!("there is a rank"),
    }
}

/// The same over all sums at once: the least maximum for every batch.
fn table(costs: &[RankCost], batch: usize) -> f64 {
    let mut least = vec![f64::INFINITY; batch + 1];
    least[0] = 0.0;
    for cost in costs {
        let next = |total: usize| {
            (1..=total)
                .map(|served| best(cost, served).max(least[total - served]))
                .fold(f64::INFINITY, f64::min)
        };
        least = (0..=batch).map(next).collect();
    }
    least[batch]
}

/// Costs with round numbers among them, so that times coincide, and efficiencies from no gain to full gain.
fn cost() -> impl Strategy<Value = RankCost> {
    let seconds = prop_oneof![(1..6_u8).prop_map(f64::from), 0.5..5.0_f64];
    let overhead = prop_oneof![Just(0.0), 0.0..4.0_f64];
    let efficiency = prop::collection::vec(prop_oneof![Just(1.0), 0.2..1.0_f64], 0..6);
    (seconds, overhead, efficiency).prop_map(|(seconds, overhead, mut efficiency)| {
        efficiency.insert(0, 1.0);
        RankCost::new(seconds)
            .with_overhead(overhead)
            .with_efficiency(efficiency)
    })
}

/// Ranks of a few kinds.
fn costs(most: usize) -> impl Strategy<Value = Vec<RankCost>> {
    (
        prop::collection::vec(cost(), 1..4),
        prop::collection::vec(any::<prop::sample::Index>(), 1..=most),
    )
        .prop_map(|(kinds, picks)| picks.iter().map(|pick| pick.get(&kinds).clone()).collect())
}

fn check(
    costs: &[RankCost],
    batch: usize,
    local: usize,
    expected: f64,
) -> Result<(), TestCaseError> {
    let assignment = assign_workers(batch * local, local, costs)?;
    prop_assert_eq!(
        assignment.step_seconds.to_bits(),
        expected.to_bits(),
        "{} instead of {}",
        assignment.step_seconds,
        expected
    );
    prop_assert_eq!(
        assignment
            .layouts
            .iter()
            .map(iidp::WorkerLayout::samples)
            .sum::<usize>(),
        batch * local
    );
    for ((layout, cost), seconds) in assignment
        .layouts
        .iter()
        .zip(costs)
        .zip(&assignment.rank_seconds)
    {
        prop_assert!((1..=cost.max_virtual_workers()).contains(&layout.virtual_workers));
        prop_assert!(layout.accumulation_steps >= 1);
        prop_assert_eq!(layout.local_batch, local);
        prop_assert_eq!(
            cost.seconds(layout.virtual_workers, layout.accumulation_steps)
                .to_bits(),
            seconds.to_bits()
        );
        prop_assert!(*seconds <= assignment.step_seconds);
    }
    prop_assert_eq!(assign_workers(batch * local, local, costs)?, assignment);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn equals_brute_force(costs in costs(4), more in 0..22_usize, local in 1..9_usize) {
        let batch = costs.len() + more;
        check(&costs, batch, local, brute_force(&costs, batch))?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn equals_the_table_of_all_sums(costs in costs(24), more in 0..260_usize) {
        let batch = costs.len() + more;
        check(&costs, batch, 3, table(&costs, batch))?;
    }

    /// All ranks prefer groups of workers, and only odd ends make the sum: the case of the subset-sum.
    #[test]
    fn gaps_between_groups_are_bridged(ranks in 1..6_usize, v in 2..7_usize, batch in 6..300_usize) {
        let mut efficiency = vec![1.0];
        efficiency.extend((2..v).map(|_| 0.3));
        efficiency.push(1.0);
        let costs = vec![RankCost::new(1.0).with_overhead(0.25).with_efficiency(efficiency); ranks];
        check(&costs, batch, 1, table(&costs, batch))?;
    }
}

#[test]
fn one_rank_with_a_prime_batch_has_to_work_alone() {
    let cost = RankCost::new(0.5).with_efficiency([1.0; 8]);
    let assignment = assign_workers(9973, 1, &[cost]).expect("one rank takes all");
    assert_eq!(
        (
            assignment.layouts[0].virtual_workers,
            assignment.layouts[0].accumulation_steps
        ),
        (1, 9973)
    );
}

#[test]
fn faster_ranks_do_more_and_all_finish_together() {
    let costs: Vec<_> = (1..=1000)
        .map(|i| RankCost::new(f64::from(i % 7 + 1) / 8.0))
        .collect();
    let assignment = assign_workers(320_000, 8, &costs).expect("enough work");
    let least = assignment
        .rank_seconds
        .iter()
        .copied()
        .fold(f64::INFINITY, f64::min);
    assert!(assignment.step_seconds - least <= 7.0 / 8.0 + 1e-9);
}

#[test]
fn impossible_batches_are_refused_with_what_would_work() {
    let text = |global, local, costs: &[RankCost]| {
        assign_workers(global, local, costs)
            .expect_err("refused")
            .to_string()
    };
    let two = [RankCost::new(1.0), RankCost::new(2.0)];
    assert_eq!(
        text(100, 32, &two),
        "global batch of 100 samples with local batch 32: not a multiple of the local batch, 96 or 128 would be"
    );
    assert_eq!(
        text(32, 32, &two),
        "global batch of 32 samples with local batch 32: 2 ranks need a micro-batch each, expected at least 64 samples, or no more ranks than 1"
    );
    assert_eq!(
        text(0, 4, &two),
        "global batch of 0 samples with local batch 4: 2 ranks need a micro-batch each, expected at least 8 samples"
    );
    assert!(text(8, 0, &two).ends_with("the local batch is 0, expected at least 1"));
    assert!(text(8, 4, &[]).ends_with("no ranks, expected at least 1"));
    let refused = |cost: RankCost| match assign_workers(8, 4, &[RankCost::new(1.0), cost]) {
        Err(Error::Invalid { what, problem }) => format!("{what}: {problem}"),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        refused(RankCost::new(0.0)),
        "seconds per micro-batch: rank 1 has 0, expected more than 0"
    );
    assert_eq!(
        refused(RankCost::new(1.0).with_overhead(f64::NAN)),
        "overhead in seconds: rank 1 has NaN, expected 0 or more"
    );
    assert_eq!(
        refused(RankCost::new(1.0).with_efficiency([])),
        "number of virtual workers: rank 1 has 0, expected at least 1"
    );
    assert_eq!(
        refused(RankCost::new(1.0).with_efficiency([1.0, 1.5])),
        "concurrency efficiency: rank 1 has 1.5, expected more than 0 and at most 1"
    );
}
