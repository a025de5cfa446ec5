//! The memory that a search takes does not grow with the number of configurations. Alone in its process, because the
//! operating system counts the process's peak.
#![cfg(target_os = "linux")]

use hp_planner::{ClusterSpec, ModelSpec, Planner, Recompute, TrainingSpec};

/// Greatest resident memory of this process so far, in MiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .unwrap();
    let kib: u64 = line
        .split_whitespace()
        .nth(1)
        .and_then(|number| number.parse().ok())
        .unwrap();
    kib / 1024
}

#[test]
fn a_search_over_ten_thousand_gpus_stays_small() {
    let cluster = ClusterSpec::from_toml(
        r#"
        inter = { bandwidth_gb_s = 25.0, latency_us = 10.0 }
        [[groups]]
        gpu = "H100-80"
        nodes = 625
        gpus_per_node = 8
        [[groups]]
        gpu = "A100-80"
        nodes = 625
        gpus_per_node = 8
        "#,
    )
    .unwrap();
    let model = ModelSpec::gpt("gpt-1t", 128, 25_600, 160, 51_200, 2048);
    let mut training = TrainingSpec::new(4096, 2048);
    training.micro_batches = vec![1, 2];
    training.recompute = vec![Recompute::None, Recompute::Full];
    training.zero = vec![0, 1];
    training.sequence_parallel = true;
    let before = peak();
    let report = Planner::new(cluster, model, training).plan().unwrap();
    assert!(!report.front.is_empty());
    let grown = peak() - before;
    assert!(grown < 64, "{grown} MiB more");
}
