//! Replay of generated traces of the public layout.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use hp_planner::ClusterSpec;
use hp_planner::simulate::{JobTrace, Policy, SimulationOptions, simulate};

/// One job: a step takes 10 ms plus 0.2 ms per sample and, on several GPUs, 20 ms of synchronisation; the noise scale
/// rises tenfold over the job.
fn folder(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("hp-planner-traces-{}-{name}", std::process::id()));
    let _ = fs::remove_dir_all(&dir);
    let job = dir.join("job");
    fs::create_dir_all(&job).unwrap();
    for (gpu, speed) in [("aws", 1.0), ("dgx", 3.0)] {
        let mut text = "local_bsz,step_time,sync_time,placement\n".to_owned();
        for (placement, gpus) in [("1", 1), ("2", 2), ("4", 4), ("22", 4), ("44", 8)] {
            for local in [16, 32, 64, 128, 256] {
                let sync = if gpus == 1 {
                    0.0
                } else {
                    0.02 * placement.len() as f64
                };
                let step = (0.01 + 2e-4 * f64::from(local)) / speed + sync;
                writeln!(text, "{local},{step},{sync},{placement}").unwrap();
            }
        }
        fs::write(job.join(format!("placements-{gpu}.csv")), text).unwrap();
    }
    for batch in [64_u32, 256, 1024] {
        let mut text = "progress,iteration,metric,grad_sqr,grad_var\n".to_owned();
        let (mut progress, mut steps) = (0.0, 0.0);
        for epoch in 0..20 {
            let noise = 1.0 + f64::from(epoch) * 0.5;
            let scale = f64::from(batch) / 64.0;
            // Gain of a step over one of the base batch (McCandlish et al. 2018).
            let gain = (noise + 1.0) / (noise / scale + 1.0);
            progress += 1000.0;
            steps += 1000.0 / gain;
            writeln!(text, "{progress},{steps},0.5,1.0,{noise}").unwrap();
        }
        fs::write(job.join(format!("validation-{batch}.csv")), text).unwrap();
    }
    dir
}

fn cluster(spot: bool) -> ClusterSpec {
    ClusterSpec::from_toml(&format!(
        "[[groups]]\ngpu = \"T4\"\nnodes = 2\ngpus_per_node = 4\nprice_per_gpu_hour = 0.5\nspot = {spot}\n\
         [[groups]]\ngpu = \"A100-40\"\nnodes = 1\ngpus_per_node = 4\nprice_per_gpu_hour = 2.0\n"
    ))
    .unwrap()
}

#[test]
fn step_times_by_hand() {
    let dir = folder("hand");
    let job = JobTrace::from_dir(dir.join("job")).unwrap();
    assert_eq!((job.goal(), job.base_batch()), (20_000.0, 64));
    let speed = &job.speeds["aws"];
    let close =
        |a: Option<f64>, b: f64| assert!((a.unwrap() - b).abs() < 1e-12, "{a:?} against {b}");
    close(speed.step_time(1, 64), 0.01 + 2e-4 * 64.0);
    close(speed.step_time(1, 48), 0.01 + 2e-4 * 48.0);
    // Of two placements of four GPUs the one on fewer nodes.
    close(speed.step_time(4, 256), 0.01 + 2e-4 * 64.0 + 0.02);
    // 1024 on two GPUs are two passes of 256 each, of which one synchronises.
    close(speed.step_time(2, 1024), 2.0 * (0.01 + 2e-4 * 256.0) + 0.02);
    assert_eq!(speed.step_time(3, 64), None);
    assert_eq!(speed.step_time(8, 4), None);
    close(Some(job.progress[&64].steps(500.0, 2500.0)), 2000.0);
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn adaptive_policies_beat_the_fixed_one() {
    let dir = folder("policies");
    let report = simulate(&dir, &cluster(false), &SimulationOptions::default()).unwrap();
    assert_eq!(report.rows.len(), Policy::ALL.len());
    let row = |policy| report.rows.iter().find(|row| row.policy == policy).unwrap();
    let fixed = row(Policy::Fixed);
    assert_eq!(
        (fixed.switches, fixed.preemptions, fixed.last_batch),
        (0, 0, 64)
    );
    // 20,000 steps of 64 samples on eight T4 in two nodes.
    let step = 0.01 + 2e-4 * 16.0 + 0.04;
    assert!(
        (fixed.time - 20_000.0 * step).abs() < 1e-6 * fixed.time,
        "{}",
        fixed.time
    );
    assert!((fixed.cost - fixed.time * 8.0 * 0.5 / 3600.0).abs() < 1e-9);
    assert!((fixed.gpu_hours - fixed.time * 8.0 / 3600.0).abs() < 1e-9);
    assert!(row(Policy::SimiGrad).time < fixed.time);
    assert!(row(Policy::Pollux).time < fixed.time);
    for other in &report.rows {
        let hpmd = row(Policy::Hpmd);
        assert!(
            hpmd.time <= other.time || hpmd.cost <= other.cost,
            "{other:?} dominates {hpmd:?}"
        );
    }
    let table = report.to_string();
    assert_eq!(table.lines().count(), 1 + report.rows.len());
    assert_eq!(
        report,
        simulate(&dir, &cluster(false), &SimulationOptions::default()).unwrap()
    );
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn preemptions_cost_time_and_are_reproducible() {
    let dir = folder("spot");
    // The fixed job takes 1,064 s: gaps of 300 s on average put several preemptions into it.
    let options = SimulationOptions {
        preemption_seconds: 300.0,
        checkpoint_seconds: 100.0,
        ..SimulationOptions::default()
    };
    let calm = simulate(&dir, &cluster(false), &options).unwrap();
    let rough = simulate(&dir, &cluster(true), &options).unwrap();
    assert_eq!(rough, simulate(&dir, &cluster(true), &options).unwrap());
    let (a, b) = (&calm.rows[0], &rough.rows[0]);
    assert!(b.preemptions > 0 && b.time > a.time, "{a:?} {b:?}");
    let most =
        f64::from(b.preemptions) * (options.restart_seconds + options.checkpoint_seconds / 2.0);
    assert!(b.time <= a.time + most + 1e-6);
    let other = simulate(
        &dir,
        &cluster(true),
        &SimulationOptions { seed: 7, ..options },
    )
    .unwrap();
    assert_ne!(rough, other);
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_job_without_end_is_refused() {
    let dir = folder("endless");
    let job = dir.join("job");
    fs::rename(
        job.join("validation-64.csv"),
        job.join(format!("validation-{}.csv", 1_u64 << 63)),
    )
    .unwrap();
    fs::remove_file(job.join("validation-256.csv")).unwrap();
    fs::remove_file(job.join("validation-1024.csv")).unwrap();
    let error = simulate(&dir, &cluster(true), &SimulationOptions::default())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("field `job.job time`") && error.contains("0 to 10000000000 seconds"),
        "{error}"
    );
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn broken_traces_name_file_and_line() {
    let dir = folder("broken");
    let file = dir.join("job/placements-aws.csv");
    fs::write(&file, "local_bsz,step_time,placement\n1,1,1\n").unwrap();
    let run = || {
        simulate(&dir, &cluster(false), &SimulationOptions::default())
            .unwrap_err()
            .to_string()
    };
    assert!(
        run().contains("placements-aws.csv, line 1") && run().contains("sync_time"),
        "{}",
        run()
    );
    fs::write(
        &file,
        "local_bsz,step_time,sync_time,placement\n1,much,0,1\n",
    )
    .unwrap();
    assert!(
        run().contains("line 2") && run().contains("much"),
        "{}",
        run()
    );
    for cells in ["1,1,0,0", "1,1,0,-1", "1,1,0,1.5", "0,1,0,1", "1,1,2,1"] {
        fs::write(
            &file,
            format!("local_bsz,step_time,sync_time,placement\n{cells}\n"),
        )
        .unwrap();
        assert!(
            run().contains("line 2: expected a digit of GPUs per node"),
            "{cells}: {}",
            run()
        );
    }
    fs::remove_file(&file).unwrap();
    fs::remove_file(dir.join("job/placements-dgx.csv")).unwrap();
    assert!(run().contains("placements-TYPE.csv"), "{}", run());
    fs::remove_dir_all(&dir).unwrap();
    let dir = folder("unknown");
    let other = ClusterSpec::homogeneous("L4", 1, 4).unwrap();
    let error = simulate(&dir, &other, &SimulationOptions::default())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("L4") && error.contains("T4 (aws), A100 (dgx)"),
        "{error}"
    );
    fs::remove_dir_all(&dir).unwrap();
}
