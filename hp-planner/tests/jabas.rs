//! JABAS's configuration problem: profile reading, predictions by hand, and its own dynamic programme as baseline.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use hp_planner::jabas::{JabasOptions, JabasProfile};

/// Writes a folder of the profiler's layout: two servers of four GPUs, the first about 1.7 times as fast.
fn folder(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("hp-planner-jabas-{}-{name}", std::process::id()));
    let _ = fs::remove_dir_all(&dir);
    let write = |path: &str, text: &str| {
        let path = dir.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write(
        "config.json",
        r#"{"memory_profile_dir": "elsewhere/mem", "comp_profile_dir": "elsewhere/comp", "comm_profile_dir": "elsewhere/comm",
            "bucket_profile_dir": "elsewhere/bucket", "gpu_cluster_info": "elsewhere/cluster.json",
            "available_servers": ["a", "b"]}"#,
    );
    let server = |gpu: &str| {
        format!(
            r#"{{"type": "{gpu}", "number": 4, "intra_network_bandwidth": 1.5e10, "inter_network_bandwidth": 1.25e10}}"#
        )
    };
    write(
        "cluster.json",
        &format!(
            r#"{{"a": {}, "b": {}, "c": {}}}"#,
            server("fast"),
            server("slow"),
            server("off")
        ),
    );
    write(
        "bucket/net.json",
        r#"{"model": "net", "bucket_size_distribution": [8.0, 30.0, 25.0, 25.0, 9.0]}"#,
    );
    write("comm/intra.txt", "1.0,3.0\n11.0,13.0\n");
    write("comm/inter.txt", "1.0,4.0\n11.0,9.0\n");
    for (batch, most) in [(32, 4), (64, 2), (96, 1), (128, 1)] {
        for (name, sample_ms) in [("a", 2.9), ("b", 4.7)] {
            let most = if name == "a" { most.min(3) } else { most };
            write(
                &format!("mem/{batch}/{name}/max_memory_profile_info.json"),
                &format!(
                    r#"{{"gpu_type": "{name}", "total_memory": 1, "lbs": {batch}, "max_num_models": {most}}}"#
                ),
            );
            for workers in 1..=most {
                // Several workers hide part of each other's idle time; large batches have little of it.
                let idle = 12.0 / f64::from(workers);
                let pass = f64::from(workers) * (f64::from(batch) * sample_ms + idle);
                write(
                    &format!("comp/{batch}/{name}/net_{batch}_{workers}.json"),
                    &format!(
                        r#"{{"model": "net", "gpu_type": "{name}", "lbs": {batch}, "num_models": {workers}, "total_time": 0.0,
                            "data_time": {}, "fwd_time": {}, "bwd_time": {}, "update_time": 4.5,
                            "copy_time": {}, "bn_sync_time": 6.0}}"#,
                        4.0 * f64::from(workers),
                        pass / 3.0,
                        pass * 2.0 / 3.0,
                        2.0 * f64::from(workers - 1),
                    ),
                );
            }
        }
    }
    dir
}

/// Throughput, time, local batches, and local batches per unit.
type Best = (f64, f64, usize, BTreeMap<(usize, u32), usize>);

/// JABAS's own solver as its authors describe it: entries of (time, local batches, unit) in the order of time after one
/// entry of a single local batch per unit; entry by entry the best set for each number of local batches is extended by
/// replacing the entry's unit, and the walk stops at the first number that it meets exactly.
fn dynamic_programme(
    profile: &JabasProfile,
    local_batch: u32,
    batches: usize,
    unit: u32,
) -> Option<f64> {
    let gpus: u32 = profile.servers.iter().map(|server| server.gpus).sum();
    let mut table: Vec<(f64, usize, (usize, u32))> = Vec::new();
    for (server, info) in profile.servers.iter().enumerate() {
        for index in 0..info.gpus / unit {
            for workers in 1..=profile.most_workers(local_batch, server) {
                for rounds in 1..=batches as u32 / workers {
                    let time = profile.iteration_time(
                        local_batch,
                        server,
                        workers,
                        rounds,
                        gpus,
                        profile.servers.len() > 1,
                    )?;
                    table.push((time, (workers * rounds) as usize, (server, index)));
                }
            }
        }
    }
    let units = (gpus / unit) as usize;
    table.sort_by_key(|entry| entry.1);
    let mut rest = table.split_off(units);
    table.sort_by(|a, b| a.0.total_cmp(&b.0));
    rest.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut seen = std::collections::BTreeSet::new();
    table.extend(
        rest.into_iter()
            .filter(|entry| seen.insert((entry.1, entry.2))),
    );
    let rate = |count: usize, time: f64| f64::from(count as u32 * unit * local_batch) / time;
    let first = &table[0];
    let start: Best = (
        rate(first.1, first.0),
        first.0,
        first.1,
        BTreeMap::from([(first.2, first.1)]),
    );
    let mut best: Vec<Best> = vec![start; batches + 1];
    best[0] = (0.0, 0.0, 0, BTreeMap::new());
    let mut solution = None;
    let mut met = 1;
    for (index, (time, count, place)) in table.iter().enumerate().skip(1) {
        if *count > batches + 1 {
            continue;
        }
        if index == 1 {
            met = 2;
        }
        let from = met;
        for j in from..=batches {
            let mut set = best[j].3.clone();
            set.insert(*place, *count);
            let total: usize = set.values().sum();
            let slowest = time.max(best[j].1);
            let throughput = rate(total, slowest);
            if (throughput > best[j].0 && total < j) || total == j {
                best[j] = (throughput, slowest, total, set);
                if total == j {
                    met = total + 1;
                    for k in j + 1..=batches {
                        best[k] = best[j].clone();
                    }
                    break;
                }
            }
        }
        let last = &best[batches];
        if last.2 == batches && last.3.len() == units {
            solution = Some(last.0);
        }
    }
    solution
}

fn beats_the_dynamic_programme(profile: &JabasProfile) {
    let options = JabasOptions {
        may_leave_gpus: false,
        ..JabasOptions::default()
    };
    let (mut compared, mut better) = (0, 0);
    // The baseline's answers repeat over ranges of batches.
    let mut known: BTreeMap<(u32, usize), Option<f64>> = BTreeMap::new();
    for batch in 64..=4096u64 {
        let ours = profile.solve(batch, JabasOptions::default()).unwrap();
        let all = profile
            .solve(batch, options)
            .map_or(0.0, |plan| plan.throughput());
        assert!(ours.throughput() >= all);
        for local_batch in profile.local_batches() {
            if (0..profile.servers.len())
                .any(|server| profile.most_workers(local_batch, server) == 0)
            {
                continue;
            }
            let workers = (batch as f64 / f64::from(local_batch)).round_ties_even() as usize;
            let batches = workers.div_ceil(2);
            if workers + workers % 2 < profile.servers.iter().map(|s| s.gpus as usize).sum() {
                continue;
            }
            let theirs = *known
                .entry((local_batch, batches))
                .or_insert_with(|| dynamic_programme(profile, local_batch, batches, 2));
            if let Some(theirs) = theirs {
                assert!(
                    all >= theirs * (1.0 - 1e-12),
                    "batch {batch}: {all} against {theirs} with {local_batch}"
                );
                compared += 1;
                better += u32::from(all > theirs * (1.0 + 1e-12));
            }
        }
    }
    assert!(compared > 4_000, "compared {compared} times only");
    assert!(better > 0, "never better in {compared} comparisons");
}

#[test]
fn throughput_is_at_least_that_of_the_dynamic_programme() {
    let dir = folder("baseline");
    beats_the_dynamic_programme(&JabasProfile::from_dir(&dir).unwrap());
    fs::remove_dir_all(dir).unwrap();
}

/// The same on a real folder, if the environment names one.
#[test]
fn throughput_on_a_measured_folder() {
    if let Some(dir) = std::env::var_os("HP_PLANNER_JABAS_DIR") {
        beats_the_dynamic_programme(&JabasProfile::from_dir(Path::new(&dir)).unwrap());
    }
}

#[test]
fn prediction_by_hand() {
    let dir = folder("hand");
    let profile = JabasProfile::from_dir(&dir).unwrap();
    assert_eq!(profile.servers.len(), 2);
    assert_eq!(profile.local_batches(), [32, 64, 96, 128]);
    assert_eq!(
        (
            profile.most_workers(32, 0),
            profile.most_workers(32, 1),
            profile.most_workers(160, 0)
        ),
        (3, 4, 0)
    );
    // Local batch 96 on server a, one worker, two rounds, 8 GPUs on two servers. Pass: 96 * 2.9 + 12 = 290.4 ms, of which
    // a third forwards. Ideal all-reduce of s MiB: s * 2^20 / 8 * 4 * 7 / 12.5e9 s; measured 0.5 ms per ms plus 3.5 ms.
    let reduce = |mib: f64| 0.5 * (mib * 1_048_576.0 / 8.0 * 28.0 / 12.5e9 * 1000.0) + 3.5;
    let behind: f64 = [8.0, 30.0, 25.0, 25.0].map(reduce).iter().sum();
    let backward = 290.4 * 2.0 / 3.0;
    let expected = 4.0
        + 6.0
        + (4.0 + 290.4)
        + 290.4 / 3.0
        + behind.max(backward)
        + reduce(9.0)
        + 4.5 * 9.0 / 97.0;
    let got = profile.iteration_time(96, 0, 1, 2, 8, true).unwrap() * 1000.0;
    assert!((got - expected).abs() < 0.2, "{got} against {expected}");
    assert_eq!(profile.iteration_time(96, 0, 2, 1, 8, true), None);
    fs::remove_dir_all(dir).unwrap();
}

/// Every choice of ways for four units, against the solver.
#[test]
fn equals_enumeration() {
    let dir = folder("enumeration");
    let profile = JabasProfile::from_dir(&dir).unwrap();
    let options = JabasOptions {
        exact_batch: true,
        may_leave_gpus: false,
        ..JabasOptions::default()
    };
    for batch in [512u64, 640, 768, 1152] {
        let mut best = 0.0_f64;
        for local_batch in profile.local_batches() {
            if !batch.is_multiple_of(u64::from(local_batch) * 2) {
                continue;
            }
            let batches = (batch / u64::from(local_batch) / 2) as u32;
            let ways: Vec<Vec<(u32, f64)>> = [0, 0, 1, 1]
                .map(|server| {
                    let mut ways = Vec::new();
                    for workers in 1..=profile.most_workers(local_batch, server) {
                        for rounds in 1..=batches / workers {
                            let time = profile
                                .iteration_time(local_batch, server, workers, rounds, 8, true)
                                .unwrap();
                            ways.push((workers * rounds, time));
                        }
                    }
                    ways
                })
                .to_vec();
            for a in &ways[0] {
                for b in &ways[1] {
                    for c in &ways[2] {
                        for d in ways[3].iter().filter(|d| a.0 + b.0 + c.0 + d.0 == batches) {
                            best = best.max(batch as f64 / a.1.max(b.1).max(c.1).max(d.1));
                        }
                    }
                }
            }
        }
        let plan = profile.solve(batch, options).unwrap();
        assert_eq!(plan.global_batch, batch);
        assert!(
            (plan.throughput() - best).abs() <= 1e-9 * best,
            "batch {batch}: {} against {best}",
            plan.throughput()
        );
        let sum: u64 = plan
            .units
            .iter()
            .map(|unit| u64::from(unit.workers * unit.rounds))
            .sum();
        assert_eq!(sum * 2 * u64::from(plan.local_batch), batch);
    }
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn batches_beyond_the_table_are_refused() {
    let dir = folder("huge");
    let profile = JabasProfile::from_dir(&dir).unwrap();
    fs::remove_dir_all(dir).unwrap();
    for batch in [4096 * 32 * 2 + 1, u64::MAX] {
        for exact_batch in [false, true] {
            let options = JabasOptions {
                exact_batch,
                ..JabasOptions::default()
            };
            let error = profile.solve(batch, options).unwrap_err().to_string();
            assert!(
                error.contains(&format!(
                    "field `global_batch` is {batch}, allowed is at most 262144"
                )),
                "{error}"
            );
        }
    }
    // Asked for no GPU at all it says nothing, in place of overflowing.
    assert_eq!(profile.iteration_time(32, 0, 1, 1, 0, false), None);
}

#[test]
fn bad_numbers_name_file_and_field() {
    let dir = folder("numbers");
    let cluster = fs::read_to_string(dir.join("cluster.json")).unwrap();
    let error_with = |text: &str| {
        fs::write(dir.join("cluster.json"), text).unwrap();
        JabasProfile::from_dir(&dir).unwrap_err().to_string()
    };
    for number in ["0", "257", "4294967295"] {
        let error =
            error_with(&cluster.replacen("\"number\": 4", &format!("\"number\": {number}"), 1));
        assert!(
            error.contains("cluster.json: field `a.number` is"),
            "{error}"
        );
    }
    let error = error_with(&cluster.replacen("\"number\": 4", "\"number\": -4", 1));
    assert!(
        error.contains("expected a whole number from 0 to 4294967295"),
        "{error}"
    );
    let error = error_with("{}");
    assert!(error.contains("available_servers in"), "{error}");
    fs::write(dir.join("cluster.json"), &cluster).unwrap();
    let run = dir.join("comp/32/a/net_32_1.json");
    let text = fs::read_to_string(&run).unwrap();
    let at = text.find("\"data_time\": ").unwrap() + "\"data_time\": ".len();
    let end = at + text[at..].find([',', '}']).unwrap();
    fs::write(&run, format!("{}-1.0{}", &text[..at], &text[end..])).unwrap();
    let error = JabasProfile::from_dir(&dir).unwrap_err().to_string();
    assert!(
        error.contains("net_32_1.json: field `data_time` is -1, allowed is 0 or more"),
        "{error}"
    );
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn broken_folders_name_the_file() {
    let dir = folder("broken");
    fs::write(dir.join("comm/inter.txt"), "1.0,4.0\nfast\n").unwrap();
    let error = JabasProfile::from_dir(&dir).unwrap_err().to_string();
    assert!(
        error.contains("inter.txt") && error.contains("line 2"),
        "{error}"
    );
    fs::write(dir.join("comm/inter.txt"), "1.0,4.0\n").unwrap();
    let error = JabasProfile::from_dir(&dir).unwrap_err().to_string();
    assert!(
        error.contains("the curve") && error.contains("inter.txt"),
        "{error}"
    );
    fs::remove_file(dir.join("config.json")).unwrap();
    assert!(
        JabasProfile::from_dir(&dir)
            .unwrap_err()
            .to_string()
            .contains("config.json")
    );
    fs::remove_dir_all(dir).unwrap();
}
