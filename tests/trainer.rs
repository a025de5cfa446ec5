//! The trainer through its public face: the data are used exactly once, decisions repeat, layouts do not matter, errors name the thing.

use burn::tensor::{Device, Tensor};
use hpmd::adaptive_batch::{BatchLimits, NoiseScaleController};
use hpmd::hp_planner::{ClusterSpec, ModelSpec, Objective, Profile};
use hpmd::iidp::{BoxError, MicroBatch, Mode, Profiler, WorkerLayout, Workload};
use hpmd::observer::{Event, JsonLines, Observer, Observers, report};
use hpmd::{
    CharCorpus, CharGptConfig, CharGptTask, Error, SimulatedCluster, StopFlag, Task, Termination,
    Trainer, TrainerBuilder, TrainingReport,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

const CLUSTER: &str = r#"
    name = "two kinds"
    [[groups]]
    gpu = "V100-16"
    nodes = 2
    gpus_per_node = 1
    price_per_gpu_hour = 3.0
    [[groups]]
    gpu = "T4"
    nodes = 2
    gpus_per_node = 1
    price_per_gpu_hour = 0.4
"#;

fn task() -> CharGptTask {
    let verse =
        "the quality of mercy is not strained, it droppeth as the gentle rain from heaven. ";
    let corpus = CharCorpus::from_text(&verse.repeat(30), 12, 6, 0.2).unwrap();
    CharGptTask::new(
        corpus,
        CharGptConfig {
            layers: 1,
            width: 16,
            heads: 2,
            dropout: 0.0,
        },
    )
}

fn controller() -> NoiseScaleController {
    NoiseScaleController::new(1.0, BatchLimits::new(12, 48, 4).unwrap()).unwrap()
}

fn adaptive() -> TrainerBuilder<CharGptTask> {
    Trainer::builder(task())
        .local_batch(4)
        .initial_batch(12)
        .interval(5)
        .samples(600)
        .learning_rate(3e-3)
        .seed(11)
}

fn run(builder: TrainerBuilder<CharGptTask>) -> TrainingReport {
    builder.build().unwrap().run().unwrap()
}

/// Everything but the wall clock.
fn without_wall_clock(mut report: TrainingReport) -> TrainingReport {
    report.steps.iter_mut().for_each(|s| s.wall_seconds = 0.0);
    report
}

#[test]
fn the_same_seed_gives_the_same_run_to_the_bit() {
    let go = |seed| {
        without_wall_clock(run(adaptive()
            .device_speeds(vec![1.0, 0.5])
            .controller(controller())
            .seed(seed)))
    };
    let (a, b, other) = (go(11), go(11), go(12));
    assert_eq!(a, b);
    assert_ne!(a.steps[0].loss.to_bits(), other.steps[0].loss.to_bits());
    assert!(
        a.decisions.iter().any(|d| d.to_batch != d.from_batch),
        "the batch never moved: {:?}",
        a.decisions
    );
    assert_eq!(a.samples(), 600);
}

#[test]
fn the_batch_keeps_to_its_limits_and_the_learning_rate_to_the_square_root_rule() {
    let report = run(adaptive().local_devices(3).controller(controller()));
    for d in &report.decisions {
        assert!((12..=48).contains(&d.to_batch) && d.to_batch.is_multiple_of(4));
        let expected = 3e-3 * (d.to_batch as f64 / 12.0).sqrt();
        assert!(
            (d.learning_rate - expected).abs() < 1e-12 * expected,
            "{d:?}"
        );
        assert_eq!(d.micro_batches.iter().sum::<usize>() * 4, d.to_batch);
    }
    assert!(!report.decisions.is_empty());
}

#[test]
fn loss_and_statistics_do_not_depend_on_the_layout() {
    let one = run(adaptive().local_devices(1).step_limit(30));
    for speeds in [vec![1.0, 0.5], vec![0.25, 1.0, 0.5]] {
        let many = run(adaptive().device_speeds(speeds.clone()).step_limit(30));
        for (a, b) in one.steps.iter().zip(&many.steps) {
            assert!(
                (a.loss - b.loss).abs() < 2e-4,
                "{speeds:?}, step {}: {} and {}",
                a.step,
                a.loss,
                b.loss
            );
        }
        // Early steps have hardly drifted apart; later the two runs differ by the order of summation.
        let (a, b) = (&one.steps[3], &many.steps[3]);
        let close = |a: Option<f64>, b: Option<f64>| {
            (a.unwrap() - b.unwrap()).abs() <= 1e-3 * a.unwrap().abs()
        };
        assert!(
            close(a.similarity, b.similarity) && close(a.noise_scale, b.noise_scale),
            "{speeds:?}: {a:?} and {b:?}"
        );
    }
}

#[test]
fn training_lowers_the_loss() {
    let report = run(adaptive()
        .local_devices(2)
        .samples(3_000)
        .validate_every(600));
    assert_eq!(report.termination, Termination::Completed);
    assert!(report.validations.len() >= 5);
    let (first, last) = (report.steps[0].loss, report.validation_loss().unwrap());
    assert!(last < first - 1.0, "from {first} to {last}");
}

/// Notes every event's kind.
struct Kinds(Arc<Mutex<Vec<&'static str>>>);

impl Observer for Kinds {
    fn observe(&mut self, event: &Event<'_>) -> Result<(), Error> {
        self.0.lock().unwrap().push(match event {
            Event::Started { .. } => "started",
            Event::Step(_) => "step",
            Event::Validation(_) => "validation",
            Event::Decision(_) => "decision",
            Event::Finished(_) => "finished",
            _ => "other",
        });
        Ok(())
    }
}

#[test]
fn a_simulated_cluster_lays_out_the_run_and_prices_it() {
    let plan = || {
        let cluster = ClusterSpec::from_toml(CLUSTER).unwrap();
        SimulatedCluster::plan_for(&task(), cluster, 24, 4, Objective::Fastest).unwrap()
    };
    let seen = Arc::new(Mutex::new(Vec::new()));
    let report = run(adaptive()
        .planned(plan())
        .controller(controller())
        .observers(Observers::none().with(Kinds(Arc::clone(&seen)))));
    assert!(
        report.devices.len() >= 2 && report.devices.iter().all(|d| d.starts_with("simulated ")),
        "{:?}",
        report.devices
    );
    let (time, cost) = (
        report.simulated_seconds().unwrap(),
        report.simulated_cost().unwrap(),
    );
    assert!(time > 0.0 && cost > 0.0);
    let trainer = adaptive().planned(plan()).build().unwrap();
    let chosen = trainer.simulated_cluster().unwrap().chosen();
    let hourly = chosen.estimate.price_per_hour;
    assert!(
        (cost - time * hourly / 3600.0).abs() < 1e-9 * cost,
        "{cost} against {time} s at {hourly} per hour"
    );

    let page = report::render("Title", std::slice::from_ref(&report));
    let front = report.front.unwrap();
    assert!(page.contains("Pareto front (simulated)") && page.contains("chosen: "));
    assert!(
        page.contains(&front.points[front.chosen].2),
        "the choice is not named"
    );

    let seen = seen.lock().unwrap();
    assert_eq!(
        (seen.first(), seen.last()),
        (Some(&"started"), Some(&"finished"))
    );
    assert_eq!(
        seen.iter().filter(|k| **k == "step").count(),
        report.steps.len()
    );
    assert_eq!(
        seen.iter().filter(|k| **k == "decision").count(),
        report.decisions.len()
    );
}

#[test]
fn a_raised_flag_ends_the_run_with_what_was_done() {
    let stop = StopFlag::new();
    stop.raise();
    let report = run(adaptive().local_devices(2).stop_flag(stop));
    assert_eq!(
        (
            report.termination,
            report.steps.len(),
            report.validations.len()
        ),
        (Termination::Interrupted, 0, 1)
    );
    let report = run(adaptive().local_devices(2).step_limit(3));
    assert_eq!(
        (report.termination, report.steps.len()),
        (Termination::StepLimit, 3)
    );
}

#[test]
fn settings_that_cannot_be_are_refused_by_name() {
    let refused = |builder: TrainerBuilder<CharGptTask>| builder.build().unwrap_err().to_string();
    assert_eq!(
        refused(adaptive().local_devices(0)),
        "devices = 0: at least one device"
    );
    assert!(
        refused(adaptive().initial_batch(10))
            .starts_with("initial_batch = 10: a multiple of the local batch of 4")
    );
    assert!(refused(adaptive().initial_batch(0)).starts_with("initial_batch = 0"));
    assert!(refused(adaptive().local_batch(0)).starts_with("local_batch = 0"));
    assert!(refused(adaptive().samples(601)).starts_with("samples = 601"));
    assert!(refused(adaptive().samples(0)).starts_with("samples = 0"));
    assert!(refused(adaptive().interval(0)).starts_with("interval = 0"));
    assert!(
        refused(adaptive().device_speeds(vec![1.0, f64::NAN])).starts_with("device_speeds = NaN")
    );
    let message = refused(adaptive().initial_batch(8).local_devices(3));
    assert!(
        message.contains("batch") && message.contains('3') && !message.contains('\n'),
        "{message}"
    );
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(refused(adaptive().learning_rate(rate)).contains("rate"));
    }
}

#[test]
fn the_report_is_one_self_contained_page_and_events_are_lines_of_json() {
    let folder = tempfile::tempdir().unwrap();
    let events = folder.path().join("events.jsonl");
    let report = run(adaptive()
        .local_devices(2)
        .controller(controller())
        .name("a <b> & c")
        .observers(Observers::none().with(JsonLines::create(&events).unwrap())));

    let page = report::render("Title", std::slice::from_ref(&report));
    assert!(!page.contains("Pareto"), "a front without a plan");
    assert!(
        page.contains("<svg") && page.contains("a &lt;b&gt; &amp; c") && !page.contains("a <b>")
    );
    for outside in ["src=", "href=", "@import", "url("] {
        assert!(
            !page.contains(outside),
            "the page refers to something outside: {outside}"
        );
    }
    for chart in [
        "Global batch size",
        "Learning rate",
        "similarity",
        "noise scale",
        "Training loss",
    ] {
        assert!(page.contains(chart), "no chart of {chart}");
    }

    let lines = std::fs::read_to_string(&events).unwrap();
    let parsed: Vec<serde_json::Value> = lines
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    let of = |kind: &str| parsed.iter().filter(|v| v["event"] == kind).count();
    assert_eq!(
        (of("started"), of("step"), of("decision")),
        (1, report.steps.len(), report.decisions.len())
    );

    let json = serde_json::to_string(&report).unwrap();
    assert_eq!(
        serde_json::from_str::<TrainingReport>(&json).unwrap(),
        report
    );
}

/// Counts how often each sample is trained on.
struct Counting {
    inner: CharGptTask,
    drawn: Arc<Mutex<BTreeMap<u64, usize>>>,
}

impl Workload for Counting {
    type Model = <CharGptTask as Workload>::Model;

    fn init(&self, device: &Device) -> Result<Self::Model, BoxError> {
        self.inner.init(device)
    }

    fn loss(
        &self,
        model: &Self::Model,
        batch: &MicroBatch<'_>,
        device: &Device,
    ) -> Result<Tensor<1>, BoxError> {
        if batch.mode == Mode::Train {
            let mut drawn = self.drawn.lock().unwrap();
            for &key in batch.samples {
                *drawn.entry(key).or_default() += 1;
            }
        }
        self.inner.loss(model, batch, device)
    }
}

impl Task for Counting {
    fn training_samples(&self) -> &[u64] {
        self.inner.training_samples()
    }

    fn validation_samples(&self) -> &[u64] {
        self.inner.validation_samples()
    }

    fn model_spec(&self) -> ModelSpec {
        self.inner.model_spec()
    }

    fn sample_tokens(&self) -> u32 {
        self.inner.sample_tokens()
    }
}

#[test]
fn an_epoch_visits_every_sample_exactly_once_while_the_batch_changes() {
    let drawn = Arc::new(Mutex::new(BTreeMap::new()));
    let counting = Counting {
        inner: task(),
        drawn: Arc::clone(&drawn),
    };
    let keys = counting.training_samples().to_vec();
    let epoch = keys.len() / 4 * 4;
    let report = Trainer::builder(counting)
        .device_speeds(vec![1.0, 0.5])
        .local_batch(4)
        .initial_batch(12)
        .interval(3)
        .samples(epoch as u64)
        .learning_rate(3e-3)
        // So many noise scales that the batch grows within the epoch.
        .controller(NoiseScaleController::new(200.0, BatchLimits::new(12, 48, 4).unwrap()).unwrap())
        .build()
        .unwrap()
        .run()
        .unwrap();
    let sizes: BTreeSet<usize> = report.steps.iter().map(|s| s.batch).collect();
    assert!(sizes.len() > 1, "the batch never changed: {sizes:?}");
    let drawn = drawn.lock().unwrap();
    assert_eq!(drawn.len(), epoch);
    assert!(
        drawn
            .iter()
            .all(|(key, times)| *times == 1 && keys.contains(key))
    );
}

#[test]
fn a_loss_that_is_not_finite_is_named_with_rank_and_micro_batch() {
    let trainer = adaptive()
        .local_devices(2)
        .learning_rate(1e30)
        .build()
        .unwrap();
    let message = trainer.run().unwrap_err().to_string();
    assert!(
        message.contains("rank") && message.contains("micro-batch") && message.contains("loss"),
        "{message}"
    );
}

#[test]
fn the_planner_reads_what_the_profiler_writes() {
    let samples = task().training_samples().to_vec();
    let layouts: Vec<_> = [(1, 1, 1), (4, 1, 1), (2, 1, 2), (2, 2, 1)]
        .map(|(b, v, a)| WorkerLayout::new(b, v, a))
        .to_vec();
    let measured = Profiler::new(1, 3)
        .unwrap()
        .steps(task(), |config| config, &samples, &layouts)
        .unwrap();
    let model = [
        ("model", "char-gpt".to_owned()),
        ("layers", "1".to_owned()),
        ("hidden", "16".to_owned()),
        ("heads", "2".to_owned()),
        ("vocab", task().corpus().vocabulary().len().to_string()),
        ("seq", task().corpus().context().to_string()),
    ];
    let mut table = Vec::new();
    measured
        .write_planner_rows(&mut table, "T4", &model)
        .unwrap();
    let read = Profile::read(&*table, None).unwrap();
    // Rows with several virtual workers have no place in the planner's table.
    assert_eq!(read.rows.len(), 3);
    for (row, step) in read.rows.iter().zip(&measured.steps) {
        let time = row.iteration_time().unwrap();
        assert!(
            (time - step.seconds).abs() <= 1e-9,
            "{time} {}",
            step.seconds
        );
        let case = row.case().unwrap();
        assert_eq!(
            case.configuration.micro_batch as usize,
            step.layout.local_batch
        );
        assert_eq!(
            case.configuration.replicas[0].accumulation_steps as usize,
            step.layout.accumulation_steps
        );
        assert_eq!(case.training.global_batch as usize, step.layout.samples());
    }
}
