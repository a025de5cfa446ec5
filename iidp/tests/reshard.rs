//! Re-sharding between any two layouts: bit for bit, with the fewest bytes, in bounded memory, and all or nothing.

#[path = "common/state.rs"]
mod state;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use iidp::reshard::{Component, ModelSpec, Piece, RankLayout, RankState, StateLayout, TensorSpec};
use iidp::{Communicator, Error, LocalCommunicator, ParallelDims, ReshardPlan, ShardSpec};
use proptest::prelude::*;
use state::{
    Random, apply, assert_same_bits, lower_bound, on_ranks, random_layout, random_model, states,
};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// Any model, from any layout to any other: every rank gets its bits, both ways of moving give the same, and no plan moves less.
    #[test]
    fn any_layout_becomes_any_other(seed in any::<u64>()) {
        let random = &mut Random(seed);
        let model = random_model(random);
        let (from, to) = (random_layout(random, &model), random_layout(random, &model));
        let plan = ReshardPlan::new(&from, &to).unwrap();
        prop_assert_eq!(plan.bytes_sent(), lower_bound(&from, &to));
        let (before, after) = (states(&from), states(&to));
        assert_same_bits(&plan.apply_in_process(&before).unwrap(), &after);
        let moved: Vec<_> = apply(&plan, &before).into_iter().map(Result::unwrap).collect();
        assert_same_bits(&moved, &after);
        // Gathered, the state is the same as before it moved.
        let whole = StateLayout::whole(&model).unwrap();
        let gathered = ReshardPlan::new(&to, &whole).unwrap().apply_in_process(&moved).unwrap();
        assert_same_bits(&gathered, &states(&whole));
    }

    /// Where a rank's machine has a part, none of it comes from another machine.
    #[test]
    fn machines_help_themselves(seed in any::<u64>()) {
        let random = &mut Random(seed);
        let model = random_model(random);
        let (from, to) = (random_layout(random, &model), random_layout(random, &model));
        let machines: Vec<usize> = (0..40).map(|_| random.below(3)).collect();
        let plan = ReshardPlan::between_machines(&from, &to, &machines).unwrap();
        prop_assert_eq!(plan.bytes_sent(), lower_bound(&from, &to));
        assert_same_bits(&plan.apply_in_process(&states(&from)).unwrap(), &states(&to));
        for movement in plan.moves().iter().filter(|m| machines[m.from] != machines[m.to]) {
            let near = (0..from.ranks().len()).filter(|rank| machines[*rank] == machines[movement.to]);
            for rank in near {
                // What that machine lacks it lacks whole: a plan to this very rank alone would not find any of it there.
                let only: Vec<_> = (0..from.ranks().len()).map(|r| (r == rank).then_some(r)).collect();
                let alone = from.clone().surviving(&only, from.ranks().len()).unwrap();
                prop_assert!(!holds(&alone, rank, movement), "rank {} has {:?}", rank, movement);
            }
        }
    }

    /// Without some ranks the rest is enough as long as every part is on one of the others; else the missing tensor is named.
    #[test]
    fn survivors_are_enough_or_the_loss_is_named(seed in any::<u64>()) {
        let random = &mut Random(seed);
        let model = random_model(random);
        let (from, to) = (random_layout(random, &model), random_layout(random, &model));
        let ranks = from.ranks().len();
        let alive: Vec<_> = (0..ranks).map(|rank| (random.below(4) > 0).then_some(rank)).collect();
        let left = from.surviving(&alive, ranks).unwrap();
        match ReshardPlan::new(&left, &to) {
            Ok(plan) => {
                let before = states(&left);
                let mut after = plan.apply_in_process(&before).unwrap();
                let mut expected = states(&to);
                // Step counts are known of what somebody holds.
                for state in after.iter_mut().chain(&mut expected) {
                    state.steps.clear();
                }
                assert_same_bits(&after, &expected);
            }
            Err(Error::StateLost { tensor, .. }) => prop_assert!(model.position(&tensor).is_some()),
            Err(other) => prop_assert!(false, "{}", other),
        }
    }
}

/// Whether `rank` holds some element of a move's region.
fn holds(layout: &StateLayout, rank: usize, movement: &iidp::reshard::Move) -> bool {
    let model = layout.model();
    let held = &layout.ranks()[rank];
    let trainable = movement.component != Component::Buffers;
    let mut elements = state::flat(model, held, trainable);
    if movement.component == Component::Moments {
        elements = elements[held.moments.clone()].to_vec();
    }
    let tensor = &model.tensors()[movement.tensor];
    let columns: usize = tensor.shape[tensor.shard.dim().unwrap_or(0)..]
        .iter()
        .product();
    let region = movement.region;
    elements.iter().any(|(index, element)| {
        let (row, column) = (element / columns, element % columns);
        *index == movement.tensor
            && (region.first_row..region.end_row).contains(&row)
            && (region.first_column..region.end_column).contains(&column)
    })
}

/// A model of `blocks` matrices, cut by columns, with two moments.
fn matrices(blocks: usize, rows: usize, columns: usize) -> Arc<ModelSpec> {
    let tensors = (0..blocks)
        .map(|block| {
            let name = format!("blocks.{block}.weight");
            TensorSpec::new(name, [rows, columns], ShardSpec::split(1), block)
        })
        .collect();
    Arc::new(ModelSpec::new(tensors, ["moment_1", "moment_2"]).unwrap())
}

fn mesh(model: &Arc<ModelSpec>, dp: usize, tp: usize, pp: usize) -> StateLayout {
    let stages: Vec<_> = (0..model.blocks())
        .map(|block| block * pp / model.blocks())
        .collect();
    StateLayout::mesh(model, ParallelDims::new(dp, tp, pp), &stages).unwrap()
}

#[test]
fn replicas_share_the_sending() {
    let model = matrices(4, 100, 96);
    let plan = ReshardPlan::new(&mesh(&model, 3, 1, 1), &mesh(&model, 6, 1, 1)).unwrap();
    let whole = 3 * 4 * model.elements();
    assert_eq!(plan.bytes_sent(), 3 * whole);
    let sent = plan.bytes_sent_by_rank();
    let (least, most) = (
        sent[..3].iter().min().unwrap(),
        sent[..3].iter().max().unwrap(),
    );
    assert!(most - least <= whole / 10, "{sent:?}");
    assert_eq!(
        plan.bytes_received_by_rank(),
        [0, 0, 0, whole, whole, whole]
    );
    // The old replicas' buffers are taken over, not copied.
    assert_eq!(plan.bytes_kept(), 0);
    assert!((0..3).all(|rank| plan.is_unchanged(rank, Component::Parameters)));
    let before = states(plan.from());
    let after = plan.apply_in_process(&before).unwrap();
    assert!(Arc::ptr_eq(&before[1].parameters, &after[1].parameters));
}

#[test]
fn a_change_of_sharded_moments_moves_no_parameters() {
    let model = matrices(3, 10, 12);
    let plan = ReshardPlan::new(
        &mesh(&model, 3, 1, 1),
        &mesh(&model, 3, 1, 1).with_sharded_moments().unwrap(),
    )
    .unwrap();
    assert_eq!(plan.bytes_sent(), 0);
    let back = ReshardPlan::new(plan.to(), plan.from()).unwrap();
    assert!(
        back.moves()
            .iter()
            .all(|movement| movement.component == Component::Moments)
    );
    assert_eq!(back.bytes_sent(), 2 * 4 * 2 * model.elements());
    let text = back.to_string();
    assert!(text.starts_with("rank 0 to 1: 960 bytes in "), "{text}");
    assert!(
        text.ends_with("5760 bytes sent, 2880 bytes copied in place, of 12960"),
        "{text}"
    );
}

#[test]
fn layouts_and_plans_that_cannot_be_are_refused() {
    let model = matrices(2, 4, 6);
    let layout = |ranks| StateLayout::new(&model, ranks);
    let piece = |tensor, ranges: &[(usize, usize)]| RankLayout {
        pieces: vec![Piece {
            tensor,
            ranges: ranges.iter().map(|&(start, end)| start..end).collect(),
        }],
        moments: 0..0,
    };
    for (bad, part) in [
        (
            piece(2, &[(0, 6)]),
            "rank 0: tensor 2, expected less than 2",
        ),
        (piece(0, &[(0, 7)]), "separate ranges in 0..6"),
        (piece(0, &[(0, 4), (3, 6)]), "separate ranges in 0..6"),
        (
            RankLayout {
                moments: 0..25,
                ..piece(0, &[(0, 6)])
            },
            "moments 0..25, expected a range in 0..24",
        ),
    ] {
        let error = layout(vec![bad]).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let error = StateLayout::mesh(&model, ParallelDims::new(1, 4, 1), &[0, 0]).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("dimension 1 of blocks.0.weight of 6"),
        "{error}"
    );
    let error = StateLayout::mesh(&model, ParallelDims::new(1, 1, 2), &[0, 2]).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("block 1 on stage 2, expected 0..2"),
        "{error}"
    );
    assert!(matches!(
        StateLayout::mesh(&model, ParallelDims::new(1, 1, 2), &[0]),
        Err(Error::LengthMismatch {
            got: 1,
            expected: 2,
            ..
        })
    ));
    let uneven = layout(vec![piece(0, &[(0, 6)])]).unwrap();
    assert!(uneven.clone().with_sharded_moments().is_err());
    assert!(matches!(
        uneven.clone().on(&[3], 3),
        Err(Error::NoSuchRank { rank: 3, size: 3 })
    ));
    // Nobody has tensor 1.
    let whole = StateLayout::whole(&model).unwrap();
    assert_eq!(
        ReshardPlan::new(&uneven, &whole).unwrap_err(),
        Error::StateLost {
            tensor: "blocks.1.weight".into(),
            rank: 0,
            elements: 24
        }
    );
    let other = StateLayout::whole(&matrices(2, 4, 12)).unwrap();
    let error = ReshardPlan::new(&whole, &other).unwrap_err().to_string();
    assert!(
        error.contains("blocks.0.weight of shape [4, 6] in one"),
        "{error}"
    );
}

#[test]
fn ranks_that_disagree_refuse_together_and_can_go_on() {
    let model = matrices(2, 4, 6);
    let (one, two) = (mesh(&model, 1, 1, 1), mesh(&model, 1, 2, 1));
    let (plan, other) = (
        ReshardPlan::new(&one, &two).unwrap(),
        ReshardPlan::new(&one, &mesh(&model, 2, 1, 1)).unwrap(),
    );
    let before = states(&one);
    let short = RankState::new(vec![0.0; 3], vec![]);
    let nothing = RankState::default();
    let group = LocalCommunicator::group(2, Duration::from_secs(10)).unwrap();
    let results = on_ranks(group, |communicator| {
        let rank = communicator.rank();
        let mine = before.get(rank).unwrap_or(&nothing);
        let different = if rank == 0 { &plan } else { &other };
        let refusals = [
            different.apply(&communicator, mine).unwrap_err(),
            plan.apply(&communicator, if rank == 0 { &short } else { mine })
                .unwrap_err(),
            plan.apply(&communicator, if rank == 1 { &short } else { mine })
                .unwrap_err(),
        ];
        (refusals, plan.apply(&communicator, mine).unwrap())
    });
    for (rank, result) in results.into_iter().enumerate() {
        let (refusals, after) = result.unwrap();
        let refused = |rank, problem: &str| Error::ReshardRefused {
            rank,
            problem: problem.into(),
        };
        assert_eq!(
            refusals,
            [
                refused(1, "its plan is another than rank 0's"),
                refused(0, "parameters of rank 0 has 3 elements, expected 48"),
                refused(1, "parameters of rank 1 has 3 elements, expected 0"),
            ]
        );
        assert_same_bits(&[after], &states(&two)[rank..=rank]);
    }
    let group = LocalCommunicator::group(1, Duration::from_secs(10)).unwrap();
    let error = plan.apply(&group[0], &before[0]).unwrap_err().to_string();
    assert!(
        error.contains("1 ranks communicate, expected at least the 2 of the plan"),
        "{error}"
    );
    let mut diverged = states(&mesh(&model, 2, 1, 1));
    diverged[1].steps[0] += 1;
    let plan = ReshardPlan::new(&mesh(&model, 2, 1, 1), &two).unwrap();
    let error = plan.apply_in_process(&diverged).unwrap_err().to_string();
    assert!(
        error.contains("101 updates of blocks.0.weight on one, 100 on another"),
        "{error}"
    );
}

/// A communicator that does something at one of its messages, and knows how many elements are on their way.
#[derive(Debug)]
struct Meddling<'a> {
    inner: LocalCommunicator,
    /// The message, counted from 0, and what happens to it.
    at: Option<(usize, Fault)>,
    sent: AtomicUsize,
    flight: &'a Flight,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// The rank panics before sending.
    Dies,
    /// The message arrives without its end.
    Tears,
    /// The message never arrives.
    Vanishes,
    /// The rank gives up.
    Aborts,
}

#[derive(Debug, Default)]
struct Flight {
    now: AtomicUsize,
    most: AtomicUsize,
}

impl Communicator for Meddling<'_> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn size(&self) -> usize {
        self.inner.size()
    }
    fn all_reduce_sum(&self, data: &mut [f32]) -> Result<(), Error> {
        self.inner.all_reduce_sum(data)
    }
    fn all_reduce_sum_f64(&self, data: &mut [f64]) -> Result<(), Error> {
        self.inner.all_reduce_sum_f64(data)
    }
    fn reduce_scatter_sum(&self, data: &mut [f32]) -> Result<std::ops::Range<usize>, Error> {
        self.inner.reduce_scatter_sum(data)
    }
    fn all_gather(&self, data: &mut [f32]) -> Result<(), Error> {
        self.inner.all_gather(data)
    }
    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        self.inner.all_gather_bytes(bytes)
    }
    fn broadcast(&self, data: &mut [f32], root: usize) -> Result<(), Error> {
        self.inner.broadcast(data, root)
    }
    fn send(&self, to: usize, tag: u64, mut data: Vec<f32>) -> Result<(), Error> {
        let number = self.sent.fetch_add(1, Ordering::SeqCst);
        match self
            .at
            .filter(|(at, _)| *at == number)
            .map(|(_, fault)| fault)
        {
            Some(Fault::Dies) => std::panic::resume_unwind(Box::new("the rank dies")),
            Some(Fault::Tears) => {
                data.pop();
            }
            Some(Fault::Vanishes) => return Ok(()),
            Some(Fault::Aborts) => return Err(self.inner.abort("out of patience")),
            None => {}
        }
        let now = self.flight.now.fetch_add(data.len(), Ordering::SeqCst) + data.len();
        self.flight.most.fetch_max(now, Ordering::SeqCst);
        self.inner.send(to, tag, data)
    }
    fn recv(&self, from: usize, tag: u64) -> Result<Vec<f32>, Error> {
        let data = self.inner.recv(from, tag)?;
        self.flight.now.fetch_sub(data.len(), Ordering::SeqCst);
        Ok(data)
    }
    fn barrier(&self) -> Result<(), Error> {
        self.inner.barrier()
    }
    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>, Error> {
        self.inner.split(color, key)
    }
    fn abort(&self, reason: &str) -> Error {
        self.inner.abort(reason)
    }
}

fn meddled(
    plan: &ReshardPlan,
    before: &[RankState],
    fault: Option<(usize, usize, Fault)>,
    flight: &Flight,
) -> Vec<Option<Result<RankState, Error>>> {
    let group = LocalCommunicator::group(plan.world_size(), Duration::from_millis(400)).unwrap();
    on_ranks(group, |inner| {
        let rank = inner.rank();
        let communicator = Meddling {
            inner,
            at: fault
                .filter(|(at, ..)| *at == rank)
                .map(|(_, message, fault)| (message, fault)),
            sent: AtomicUsize::new(0),
            flight,
        };
        plan.apply(&communicator, &before[rank])
    })
}

#[test]
fn a_failure_anywhere_fails_all_and_the_old_state_still_trains() {
    let model = matrices(6, 300, 300);
    let from = mesh(&model, 2, 2, 1);
    let to = mesh(&model, 1, 1, 4);
    let plan = ReshardPlan::new(&from, &to).unwrap();
    let before = states(&from);
    for (fault, messages) in [
        (Fault::Dies, ["panicked"; 2]),
        (Fault::Tears, ["re-sharding: a message from rank 1 has "; 2]),
        // Whoever waits for it waits in vain, or gets a later one that is shorter.
        (
            Fault::Vanishes,
            ["waited longer than 400ms", "a message from rank 1 has "],
        ),
        (Fault::Aborts, ["out of patience"; 2]),
    ] {
        for at in [0, 3, 6] {
            if fault == Fault::Tears && at > 0 {
                continue; // later ones are emptied buffers on their way back, too
            }
            let results = meddled(&plan, &before, Some((1, at, fault)), &Flight::default());
            for (rank, result) in results.iter().enumerate() {
                let Some(result) = result else {
                    assert_eq!((rank, fault), (1, Fault::Dies));
                    continue;
                };
                let error = result
                    .as_ref()
                    .expect_err("no rank goes on alone")
                    .to_string();
                let named = messages.iter().any(|message| error.contains(message));
                assert!(named, "{fault:?} at {at}, rank {rank}: {error}");
            }
            // The old layout is as it was: bits, and ready for the next attempt.
            assert_same_bits(&before, &states(&from));
        }
    }
    let after = meddled(&plan, &before, None, &Flight::default());
    let after: Vec<_> = after
        .into_iter()
        .map(|result| result.unwrap().unwrap())
        .collect();
    assert_same_bits(&after, &states(&to));
}

#[test]
fn little_is_on_its_way_at_any_time() {
    let model = matrices(2, 1000, 2048);
    let (from, to) = (mesh(&model, 1, 1, 1), mesh(&model, 1, 1, 2));
    let plan = ReshardPlan::new(&from, &to).unwrap();
    let mut before = states(&from);
    before.push(RankState::default());
    let flight = Flight::default();
    let after = meddled(&plan, &before, None, &flight);
    let after: Vec<_> = after
        .into_iter()
        .map(|result| result.unwrap().unwrap())
        .collect();
    assert_same_bits(&after, &states(&to));
    assert_eq!(plan.bytes_sent(), 3 * 4 * 2_048_000);
    let most = 4 * flight.most.load(Ordering::SeqCst);
    assert!(most <= 4 * 256 * 1024, "{most} bytes in flight");
    assert_eq!(flight.now.load(Ordering::SeqCst), 0);
}
