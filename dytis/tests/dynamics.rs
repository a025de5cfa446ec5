//! The measures tell streams apart as they should: a real stream from its own shuffle, real data
//! from uniform keys.

#[path = "support/keysets.rs"]
mod keysets;
#[path = "support/streams.rs"]
mod streams;

use dytis::dynamics::{DynamicClass, DynamicProfile, ProfileOptions};
use keysets::{KEY_SETS, key_set};
use streams::{Rng, STREAMS, Stream};

fn stream(name: &str, n: usize) -> Vec<u64> {
    Stream::named(name).unwrap().keys(n, 1)
}

fn shuffled(mut keys: Vec<u64>) -> Vec<u64> {
    Rng::new(5).shuffle(&mut keys);
    keys
}

#[test]
fn shuffling_flight_times_lowers_the_divergence_by_an_order_of_magnitude() {
    let keys = key_set("nyc_time");
    let in_order = DynamicProfile::of(keys.iter().copied()).unwrap();
    let mixed = DynamicProfile::of(shuffled(keys)).unwrap();
    assert!(in_order.kdd > 10.0 * mixed.kdd, "{in_order}\n\n{mixed}");
    assert!(mixed.kdd < 1.5 * mixed.kdd_floor, "{mixed}");
    assert_eq!(in_order.class(), DynamicClass::Drifting);
    assert_eq!(mixed.class(), DynamicClass::Steady);
}

#[test]
fn uniform_keys_measure_near_both_minima() {
    let profile = DynamicProfile::of(stream("uniform", 200_000)).unwrap();
    assert!(profile.skewness < 0.05, "{profile}");
    assert!(
        (0.7..1.3).contains(&(profile.kdd / profile.kdd_floor)),
        "{profile}"
    );
    assert_eq!(profile.class(), DynamicClass::Steady);
}

#[test]
fn classes_of_known_streams() {
    let class = |keys: Vec<u64>| DynamicProfile::of(keys).unwrap().class();
    assert_eq!(class(stream("dense_small", 50_000)), DynamicClass::Steady);
    assert_eq!(class(stream("ascending", 50_000)), DynamicClass::Drifting);
    assert_eq!(class(stream("descending", 50_000)), DynamicClass::Drifting);
    assert_eq!(class(stream("lognormal", 50_000)), DynamicClass::Skewed);
    // Each part is one dense run more or less, and the next part another one.
    assert_eq!(class(stream("adversarial", 50_000)), DynamicClass::Drifting);

    let phone = ProfileOptions::new()
        .with_part_len(1024)
        .profile(key_set("phone_prefix"));
    assert_eq!(phone.unwrap().class(), DynamicClass::SkewedDrifting);
}

#[test]
fn nothing_drifts_once_shuffled() {
    for stream in STREAMS {
        let profile = DynamicProfile::of(shuffled(stream.keys(60_000, 2))).unwrap();
        assert!(
            profile.kdd < profile.kdd_floor + 0.25,
            "{}\n{profile}",
            stream.name
        );
    }
    for name in KEY_SETS {
        let options = ProfileOptions::new().with_part_len(1024);
        let profile = options.profile(shuffled(key_set(name))).unwrap();
        assert!(profile.kdd < profile.kdd_floor + 0.25, "{name}\n{profile}");
    }
}

#[test]
fn incremental_and_offline_forms_agree_exactly() {
    let keys = stream("review", 50_000);
    let options = ProfileOptions::new().with_part_len(3000).with_bins(100);
    let mut profiler = options.profiler().unwrap();
    let parts: Vec<_> = keys.iter().filter_map(|&key| profiler.push(key)).collect();
    assert_eq!(parts.len(), 16);
    let profile = options.profile(keys.iter().copied()).unwrap();
    assert_eq!(profiler.profile().unwrap(), profile);

    // Each part's numbers are those of the free functions on its keys alone.
    for (number, part) in keys.chunks_exact(3000).enumerate() {
        let mut sorted = part.to_vec();
        sorted.sort_unstable();
        let skewness = dytis::dynamics::skewness_variance(&sorted, 64, 16).unwrap();
        assert_eq!(parts[number].skewness, skewness);
        let kdd = (number > 0).then(|| {
            let earlier = &keys[(number - 1) * 3000..number * 3000];
            dytis::dynamics::divergence(earlier, part, 100, 0.5).unwrap()
        });
        assert_eq!(parts[number].kdd, kdd);
    }
    let mean = parts.iter().map(|part| part.skewness).sum::<f64>() / 16.0;
    assert!((profile.skewness - mean).abs() < 1e-12);
}

#[test]
fn repeats_are_one_key_for_the_models_and_count_for_the_divergence() {
    let once: Vec<u64> = (0..1000).collect();
    let options = ProfileOptions::new().with_part_len(2000).with_slices(4);
    let twice = options
        .profile(once.iter().flat_map(|&key| [key; 2]).chain([0; 2000]))
        .unwrap();
    assert_eq!(twice.skewness, f64::midpoint(0.0, 0.1875));
    assert!(twice.kdd > 3.0);
}
