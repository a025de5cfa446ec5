#![allow(
    clippy::float_cmp,
    reason = "the measures are exact where these tests compare them"
)]

use alloc::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::Error;

/// Greedy regression by the book: try every line through the first point that touches the corner
/// of some later point's error bar, in exact fractions.
fn models_by_search(keys: &[u64], bound: i128) -> usize {
    let fits = |part: &[u64], rise: i128, run: i128| {
        part.iter().enumerate().all(|(rank, &key)| {
            let at = rise * i128::from(key - part[0]);
            (at - rank as i128 * run).abs() <= bound * run
        })
    };
    let one_line = |part: &[u64]| {
        part.len() < 2
            || part.iter().enumerate().skip(1).any(|(rank, &key)| {
                let run = i128::from(key - part[0]);
                [rank as i128 + bound, rank as i128 - bound]
                    .iter()
                    .any(|&rise| fits(part, rise, run))
            })
    };
    let (mut models, mut rest) = (0, keys);
    while !rest.is_empty() {
        let len = (1..=rest.len())
            .take_while(|&len| one_line(&rest[..len]))
            .last()
            .unwrap();
        rest = &rest[len..];
        models += 1;
    }
    models
}

proptest! {
    #[test]
    fn the_cone_finds_as_many_models_as_a_search_over_lines(
        keys in prop::collection::btree_set(0_u64..2000, 0..60), bound in 1_usize..6,
    ) {
        let keys: Vec<u64> = keys.into_iter().collect();
        prop_assert_eq!(linear_models(&keys, bound).unwrap(), models_by_search(&keys, bound as i128));
    }

    #[test]
    fn cells_are_equal_and_in_order(low in any::<u64>(), high in any::<u64>(), x in any::<u64>(), cells in 1_usize..300) {
        let (low, high) = (low.min(high), low.max(high));
        let x = x.clamp(low, high);
        let j = cell(x, low, high, cells);
        prop_assert!(j < cells);
        // x lies in [j w / cells, (j + 1) w / cells).
        let (offset, width) = (u128::from(x - low), u128::from(high - low) + 1);
        prop_assert!(j as u128 * width <= offset * cells as u128);
        prop_assert!(offset * (cells as u128) < (j as u128 + 1) * width);
    }

    #[test]
    fn divergence_is_never_negative_and_blind_to_order(
        mut p in prop::collection::vec(any::<u64>(), 1..200), q in prop::collection::vec(any::<u64>(), 1..200),
    ) {
        let kdd = divergence(&p, &q, 32, 0.5).unwrap();
        prop_assert!(kdd >= 0.0 && kdd.is_finite());
        p.reverse();
        prop_assert_eq!(kdd, divergence(&p, &q, 32, 0.5).unwrap());
        prop_assert_eq!(divergence(&q, &q, 32, 0.5).unwrap(), 0.0);
    }
}

#[test]
fn models_at_the_ends_of_the_key_space() {
    assert_eq!(linear_models(&[], 1), Ok(0));
    assert_eq!(linear_models(&[u64::MAX], 1), Ok(1));
    assert_eq!(linear_models(&[0, u64::MAX], 1), Ok(1));
    let steep: Vec<u64> = (0..100).chain([u64::MAX]).collect();
    assert_eq!(linear_models(&steep, 4), Ok(2));
    assert_eq!(skewness_variance(&[0, u64::MAX], 4, 1), Ok(0.25));
}

#[test]
fn variance_by_hand() {
    // Slices of width 250: the first holds 0..=249 on one line, the second a run of another
    // density, the last only its end.
    let keys: Vec<u64> = (0..250)
        .chain((250..500).step_by(50))
        .chain([999])
        .collect();
    // Models 1, 1, 0, 1: mean 3/4, variance 3/16.
    assert_eq!(skewness_variance(&keys, 4, 2), Ok(3.0 / 16.0));
}

#[test]
fn bad_arguments_are_named() {
    assert_eq!(
        linear_models(&[1, 2, 2], 4),
        Err(Error::Unsorted { position: 2 })
    );
    assert_eq!(
        linear_models(&[], 0).unwrap_err().to_string(),
        "error_bound must lie in 1..=4294967295, got 0"
    );
    assert_eq!(
        skewness_variance(&[], 4, 4),
        Err(Error::EmptyPart { which: "only" })
    );
    assert_eq!(
        skewness_variance(&[3, 1], 4, 4),
        Err(Error::Unsorted { position: 1 })
    );
    assert_eq!(
        divergence(&[1], &[], 4, 0.5),
        Err(Error::EmptyPart { which: "later" })
    );
    assert_eq!(
        divergence(&[], &[1], 4, 0.5),
        Err(Error::EmptyPart { which: "earlier" })
    );
    for got in [0.0, -1.0, f64::INFINITY] {
        assert_eq!(
            divergence(&[1], &[1], 4, got),
            Err(Error::Smoothing { value: got })
        );
    }
    assert!(divergence(&[1], &[1], 4, f64::NAN).is_err());
    let count = |options: ProfileOptions| match options.profiler::<u64>().unwrap_err() {
        Error::Parameter { name, value, .. } => (name, value),
        other => panic!("{other}"),
    };
    let new = ProfileOptions::new;
    assert_eq!(count(new().with_part_len(15)), ("part_len", 15));
    assert_eq!(count(new().with_slices(0)), ("slices", 0));
    assert_eq!(count(new().with_slices(65_537)), ("slices", 65_537));
    assert_eq!(count(new().with_error_bound(0)), ("error_bound", 0));
    assert_eq!(count(new().with_bins(1 << 21)), ("bins", 1 << 21));
    assert_eq!(
        DynamicProfile::of(0..8191_u64),
        Err(Error::TooFewKeys {
            needed: 8192,
            part_len: 4096,
            got: 8191
        })
    );
}

#[test]
fn the_table_names_every_measure() {
    let profile = DynamicProfile::of(0..10_000_u64).unwrap();
    let table = profile.to_string();
    let widths: Vec<usize> = table.lines().map(str::len).collect();
    assert!(widths.iter().all(|&width| width == widths[0]), "{table}");
    for word in [
        "drifting",
        "10000",
        "skewness",
        "linear models",
        "KDD",
        "100.0 %",
    ] {
        assert!(table.contains(word), "{word} not in\n{table}");
    }
}
