//! The front against its definition, checked by brute force.

use hp_planner::{Objective, ParetoFront};
use proptest::prelude::*;

/// Coordinates from a small grid, so that ties in one and in both are common.
fn points() -> impl Strategy<Value = Vec<(u8, u8, u8)>> {
    prop::collection::vec((0u8..12, 0u8..12, 0u8..4), 1..40)
}

fn build(points: &[(u8, u8, u8)]) -> ParetoFront<u8> {
    let mut front = ParetoFront::new();
    for &(t, c, payload) in points {
        front.insert(f64::from(t), f64::from(c), payload).unwrap();
    }
    front
}

fn dominates(a: (u8, u8), b: (u8, u8)) -> bool {
    a.0 <= b.0 && a.1 <= b.1 && a != b
}

proptest! {
    #[test]
    fn holds_exactly_what_nothing_dominates(points in points()) {
        let front = build(&points);
        let mut expected: Vec<(u8, u8, u8)> = points
            .iter()
            .copied()
            .filter(|&(t, c, _)| !points.iter().any(|&(u, d, _)| dominates((u, d), (t, c))))
            .collect();
        expected.sort_unstable();
        expected.dedup_by_key(|p| (p.0, p.1));
        let got: Vec<(u8, u8, u8)> = front.iter().map(|p| (p.time as u8, p.cost as u8, p.payload)).collect();
        prop_assert_eq!(got, expected);
        for t in 0..13u8 {
            for c in 0..13u8 {
                let expected = points.iter().any(|&(u, d, _)| dominates((u, d), (t, c)));
                prop_assert_eq!(front.dominates(f64::from(t), f64::from(c)), expected);
            }
        }
    }

    #[test]
    fn does_not_depend_on_the_order(points in points(), cut in 0usize..40, seed in any::<u64>()) {
        let front = build(&points);
        let mut shuffled = points.clone();
        let mut state = seed | 1;
        for i in (1..shuffled.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            shuffled.swap(i, (state >> 33) as usize % (i + 1));
        }
        prop_assert_eq!(&build(&shuffled), &front);
        let cut = cut.min(points.len());
        let mut merged = build(&points[cut..]);
        merged.merge(build(&points[..cut]));
        prop_assert_eq!(&merged, &front);
    }

    #[test]
    fn knee_and_weights_ignore_units(
        points in prop::collection::vec((0.0f64..1e4, 0.0f64..1e3), 1..30),
        scale_time in 1e-6f64..1e6,
        scale_cost in 1e-6f64..1e6,
    ) {
        let (mut front, mut scaled) = (ParetoFront::new(), ParetoFront::new());
        for (i, &(t, c)) in points.iter().enumerate() {
            front.insert(t, c, i).unwrap();
            scaled.insert(t * scale_time, c * scale_cost, i).unwrap();
        }
        for objective in [Objective::Knee, Objective::MinProduct, Objective::Weighted { time: 0.3, cost: 0.7 }] {
            prop_assert_eq!(
                front.select(objective).unwrap().point.payload,
                scaled.select(objective).unwrap().point.payload
            );
        }
    }

    #[test]
    fn limits_are_kept_or_missed_by_the_least(points in points(), limit in 0.0f64..13.0) {
        let front = build(&points);
        let by_budget = front.select(Objective::Budget(limit)).unwrap();
        let kept = front.iter().filter(|p| p.cost <= limit).map(|p| p.time).reduce(f64::min);
        if let Some(time) = kept {
            prop_assert_eq!((by_budget.point.time, by_budget.shortfall), (time, None));
        } else {
            let least = front.iter().map(|p| p.cost - limit).reduce(f64::min);
            prop_assert_eq!(by_budget.shortfall, least);
        }
        let by_deadline = front.select(Objective::Deadline(limit)).unwrap();
        let kept = front.iter().filter(|p| p.time <= limit).map(|p| p.cost).reduce(f64::min);
        if let Some(cost) = kept {
            prop_assert_eq!((by_deadline.point.cost, by_deadline.shortfall), (cost, None));
        } else {
            let least = front.iter().map(|p| p.time - limit).reduce(f64::min);
            prop_assert_eq!(by_deadline.shortfall, least);
        }
    }

    #[test]
    fn thinning_covers_all_and_keeps_the_ends(points in points(), epsilon in 0.0f64..1.0) {
        let front = build(&points);
        let thin = front.clone().thinned(epsilon).unwrap();
        prop_assert_eq!(thin.iter().next(), front.iter().next());
        prop_assert_eq!(thin.iter().last(), front.iter().last());
        for p in &front {
            let reach = 1.0 + epsilon;
            prop_assert!(thin.iter().any(|q| q.time <= p.time * reach && q.cost <= p.cost * reach));
        }
        for q in &thin {
            prop_assert!(front.iter().any(|p| p == q));
        }
        prop_assert_eq!(front.clone().thinned(0.0).unwrap(), front);
    }

    /// Every rule against its own definition, by trying all points; the chord as a line in the plane.
    #[test]
    fn rules_choose_what_they_say(
        points in prop::collection::vec((0.0f64..100.0, 0.0f64..100.0), 1..30),
        weights in (0.0f64..1.0, 0.01f64..1.0),
    ) {
        let mut front = ParetoFront::new();
        for (i, &(t, c)) in points.iter().enumerate() {
            front.insert(t, c, i).unwrap();
        }
        let all = front.points();
        let (first, last) = (&all[0], &all[all.len() - 1]);
        let scale = |value: f64, best: f64, worst: f64| if worst > best { (value - best) / (worst - best) } else { 0.0 };
        let scaled = |i: usize| {
            (scale(all[i].time, first.time, last.time), scale(all[i].cost, last.cost, first.cost))
        };
        let chosen = |objective| front.select(objective).unwrap().index;
        let best = |score: &dyn Fn(usize) -> f64| (0..all.len()).map(score).fold(f64::INFINITY, f64::min);
        // Distance from the line through (0, 1) and (1, 0), positive on the side of the origin.
        let knee = |i: usize| {
            let (t, c) = scaled(i);
            (t + c - 1.0) / 2.0_f64.sqrt()
        };
        prop_assert!((knee(chosen(Objective::Knee)) - best(&knee)).abs() < 1e-9);
        let weighted = |i: usize| weights.0 * scaled(i).0 + weights.1 * scaled(i).1;
        let objective = Objective::Weighted { time: weights.0, cost: weights.1 };
        prop_assert!((weighted(chosen(objective)) - best(&weighted)).abs() < 1e-9);
        let product = |i: usize| all[i].time * all[i].cost;
        prop_assert!((product(chosen(Objective::MinProduct)) - best(&product)).abs() < 1e-6);
        prop_assert_eq!(chosen(Objective::Fastest), 0);
        prop_assert_eq!(chosen(Objective::Cheapest), all.len() - 1);
    }
}
