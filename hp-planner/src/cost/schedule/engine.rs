//! The simulation: fixed orders by walking the dependencies, zero-bubble schedules by a greedy event loop.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::order::{self, Step};
use super::{Pass, Pipeline, PipelineTime, Task, Timeline, in_flight, splits_backward};
use crate::training::Schedule;

/// The schedule with all tasks.
pub(super) fn timeline(pipeline: &Pipeline, schedule: Schedule) -> Timeline {
    let mut tasks = if splits_backward(schedule) {
        shortest(pipeline, schedule)
    } else {
        fixed(pipeline, schedule)
    };
    tasks.sort_by(|a, b| {
        (a.device, a.start)
            .partial_cmp(&(b.device, b.start))
            .unwrap_or(Ordering::Equal)
    });
    let summary = summarise(pipeline, &tasks);
    Timeline { tasks, summary }
}

/// What the schedule takes.
pub(super) fn time(pipeline: &Pipeline, schedule: Schedule) -> PipelineTime {
    timeline(pipeline, schedule).summary
}

/// The zero-bubble schedule of the rule that gives the least period, or of the fixed order where the layout has one.
fn shortest(pipeline: &Pipeline, schedule: Schedule) -> Vec<Task> {
    let mut best = Greedy::new(pipeline, schedule, Rule::Alternate).run();
    let mut keep = |other: Vec<Task>| {
        if period(pipeline, &other) < period(pipeline, &best) {
            best = other;
        }
    };
    keep(Greedy::new(pipeline, schedule, Rule::BackwardFirst).run());
    if schedule != Schedule::ZbV {
        keep(fixed(pipeline, schedule));
    }
    best
}

fn duration(pipeline: &Pipeline, split: bool, pass: Pass, stage: usize) -> f64 {
    let work = &pipeline.work[stage];
    match pass {
        Pass::Forward => work.forward,
        Pass::Backward if split => work.backward,
        Pass::Backward => work.backward + work.weight,
        Pass::Weight => work.weight,
    }
}

/// End times of forward and backward passes by virtual stage and micro-batch; NaN until known.
struct Ends {
    micro_batches: usize,
    forward: Vec<f64>,
    backward: Vec<f64>,
}

impl Ends {
    fn new(pipeline: &Pipeline) -> Self {
        let all = pipeline.work.len() * pipeline.micro_batches;
        Self {
            micro_batches: pipeline.micro_batches,
            forward: vec![f64::NAN; all],
            backward: vec![f64::NAN; all],
        }
    }

    fn at(&self, stage: usize, micro_batch: usize) -> usize {
        stage * self.micro_batches + micro_batch
    }

    /// When the inputs of a pass are there; NaN if that is not known yet.
    fn ready(&self, pipeline: &Pipeline, hops: &[f64], step: Step) -> f64 {
        let Step {
            pass,
            stage,
            micro_batch,
        } = step;
        match pass {
            Pass::Forward if stage == 0 => 0.0,
            Pass::Forward => self.forward[self.at(stage - 1, micro_batch)] + hops[stage - 1],
            Pass::Backward if stage + 1 == pipeline.work.len() => {
                self.forward[self.at(stage, micro_batch)]
            }
            // The gradient comes from the next stage, which itself waited for this stage's forward pass.
            Pass::Backward => self.backward[self.at(stage + 1, micro_batch)] + hops[stage],
            Pass::Weight => self.backward[self.at(stage, micro_batch)],
        }
    }

    fn set(&mut self, step: Step, end: f64) {
        let at = self.at(step.stage, step.micro_batch);
        match step.pass {
            Pass::Forward => self.forward[at] = end,
            Pass::Backward => self.backward[at] = end,
            Pass::Weight => {}
        }
    }
}

fn hops(pipeline: &Pipeline, schedule: Schedule) -> Vec<f64> {
    (0..pipeline.transfer.len())
        .map(|v| pipeline.hop(schedule, v))
        .collect()
}

/// Runs the fixed orders: every device advances as far as its inputs are known, until all are through.
fn fixed(pipeline: &Pipeline, schedule: Schedule) -> Vec<Task> {
    let p = pipeline.devices;
    let split = splits_backward(schedule);
    let hops = hops(pipeline, schedule);
    let orders: Vec<Vec<Step>> = (0..p)
        .map(|device| order::steps(pipeline, schedule, device))
        .collect();
    let mut ends = Ends::new(pipeline);
    let (mut next, mut free) = (vec![0; p], vec![0.0_f64; p]);
    let mut tasks = Vec::with_capacity(orders.iter().map(Vec::len).sum());
    loop {
        let before = tasks.len();
        // Forward passes run down the devices and gradients up, so sweeping both ways lets each sweep go far.
        for device in (0..p).chain((0..p).rev()) {
            while let Some(&step) = orders[device].get(next[device]) {
                let ready = ends.ready(pipeline, &hops, step);
                if ready.is_nan() {
                    break;
                }
                let start = free[device].max(ready);
                let end = start + duration(pipeline, split, step.pass, step.stage);
                ends.set(step, end);
                tasks.push(Task {
                    device,
                    stage: step.stage,
                    micro_batch: step.micro_batch,
                    pass: step.pass,
                    start,
                    end,
                });
                free[device] = end;
                next[device] += 1;
            }
        }
        if tasks.len() == before {
            break;
        }
    }
    debug_assert_eq!(
        tasks.len(),
        orders.iter().map(Vec::len).sum::<usize>(),
        "the fixed orders have no cycle"
    );
    tasks
}

/// A moment at which a device may find something to do.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Wake {
    time: f64,
    device: usize,
}

impl Eq for Wake {}

impl Ord for Wake {
    fn cmp(&self, other: &Self) -> Ordering {
        other
            .time
            .total_cmp(&self.time)
            .then(other.device.cmp(&self.device))
    }
}

impl PartialOrd for Wake {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Passes of one kind of one virtual stage: micro-batches go in order, so counts say all.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    forward: usize,
    backward: usize,
    weight: usize,
}

/// What a free device prefers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// Gradient of the input, else a forward pass if it may hold one more, else a gradient of the weights.
    BackwardFirst,
    /// The same after a forward pass. After a gradient of the input a forward pass, for which a gradient of the weights
    /// makes room where it must: one forward, one backward. Once the device's first chunk is through, what is left of
    /// the forward passes comes first.
    Alternate,
}

struct Greedy<'a> {
    rule: Rule,
    pipeline: &'a Pipeline,
    hops: Vec<f64>,
    device_of: Vec<usize>,
    stages_of: Vec<Vec<usize>>,
    limit: Vec<usize>,
    done: Vec<Progress>,
    held: Vec<usize>,
    /// Last forward or backward pass.
    last: Vec<Pass>,
    free: Vec<f64>,
    ends: Ends,
    wakes: BinaryHeap<Wake>,
    tasks: Vec<Task>,
}

impl<'a> Greedy<'a> {
    fn new(pipeline: &'a Pipeline, schedule: Schedule, rule: Rule) -> Self {
        let p = pipeline.devices;
        let device_of: Vec<usize> = (0..pipeline.work.len())
            .map(|stage| pipeline.device_of(schedule, stage))
            .collect();
        let mut stages_of = vec![Vec::new(); p];
        for (stage, &device) in device_of.iter().enumerate() {
            stages_of[device].push(stage);
        }
        let limit = (0..p)
            .map(|device| in_flight(schedule, p, pipeline.chunks, device, pipeline.micro_batches))
            .collect();
        Self {
            rule,
            pipeline,
            hops: hops(pipeline, schedule),
            device_of,
            stages_of,
            limit,
            done: vec![Progress::default(); pipeline.work.len()],
            held: vec![0; p],
            last: vec![Pass::Forward; p],
            free: vec![0.0; p],
            ends: Ends::new(pipeline),
            wakes: (0..p).map(|device| Wake { time: 0.0, device }).collect(),
            tasks: Vec::with_capacity(3 * pipeline.work.len() * pipeline.micro_batches),
        }
    }

    fn run(mut self) -> Vec<Task> {
        while let Some(Wake { time, device }) = self.wakes.pop() {
            if time >= self.free[device]
                && let Some(step) = self.choose(device, time)
            {
                self.start(device, step, time);
            }
        }
        self.tasks
    }

    /// What `device` runs at `time`, by the rule; see [`Rule`].
    fn choose(&self, device: usize, time: f64) -> Option<Step> {
        let m = self.pipeline.micro_batches;
        let stages = &self.stages_of[device];
        let ready = |step: &Step| self.ends.ready(self.pipeline, &self.hops, *step) <= time;
        let step = |pass, stage, micro_batch| Step {
            pass,
            stage,
            micro_batch,
        };
        let backward = || {
            stages
                .iter()
                .map(|&stage| step(Pass::Backward, stage, self.done[stage].backward))
                .find(|s| s.micro_batch < self.done[s.stage].forward && ready(s))
        };
        // Later stages first: what is nearest to the turning point gives memory back soonest.
        let forward = || {
            stages
                .iter()
                .rev()
                .map(|&stage| step(Pass::Forward, stage, self.done[stage].forward))
                .find(|s| s.micro_batch < m && ready(s))
        };
        // A stage that is not the device's last leaves one place free, or the later one could never run.
        let room = self.limit[device] - self.held[device];
        let last = stages[stages.len() - 1];
        let fits = |s: &Step| room > usize::from(s.stage != last && self.done[last].forward < m);
        let weight = || {
            stages
                .iter()
                .map(|&stage| step(Pass::Weight, stage, self.done[stage].weight))
                .find(|s| s.micro_batch < self.done[s.stage].backward)
        };
        if self.rule == Rule::Alternate && self.done[stages[0]].forward == m {
            return forward().filter(fits).or_else(backward).or_else(weight);
        }
        if self.rule == Rule::Alternate && self.last[device] == Pass::Backward {
            return match forward() {
                Some(step) if fits(&step) => Some(step),
                Some(_) => weight().or_else(backward),
                None => backward().or_else(weight),
            };
        }
        backward()
            .or_else(|| forward().filter(fits))
            .or_else(weight)
    }

    fn start(&mut self, device: usize, step: Step, start: f64) {
        let Step {
            pass,
            stage,
            micro_batch,
        } = step;
        let end = start + duration(self.pipeline, true, pass, stage);
        self.ends.set(step, end);
        self.free[device] = end;
        self.wakes.push(Wake { time: end, device });
        if pass != Pass::Weight {
            self.last[device] = pass;
        }
        let progress = &mut self.done[stage];
        match pass {
            Pass::Forward => {
                progress.forward += 1;
                self.held[device] += 1;
                if stage + 1 < self.device_of.len() {
                    let time = end + self.hops[stage];
                    self.wakes.push(Wake {
                        time,
                        device: self.device_of[stage + 1],
                    });
                }
            }
            Pass::Backward => {
                progress.backward += 1;
                if stage > 0 {
                    let time = end + self.hops[stage - 1];
                    self.wakes.push(Wake {
                        time,
                        device: self.device_of[stage - 1],
                    });
                }
            }
            Pass::Weight => {
                progress.weight += 1;
                self.held[device] -= 1;
            }
        }
        self.tasks.push(Task {
            device,
            stage,
            micro_batch,
            pass,
            start,
            end,
        });
    }
}

/// First start and last end per device.
fn spans(pipeline: &Pipeline, tasks: &[Task]) -> Vec<(f64, f64)> {
    let mut spans = vec![(f64::INFINITY, 0.0_f64); pipeline.devices];
    for task in tasks {
        let span = &mut spans[task.device];
        *span = (span.0.min(task.start), span.1.max(task.end));
    }
    spans
}

fn period(pipeline: &Pipeline, tasks: &[Task]) -> f64 {
    spans(pipeline, tasks)
        .iter()
        .map(|(start, end)| end - start)
        .fold(0.0, f64::max)
}

/// `tasks` in the order in which each device runs them.
fn summarise(pipeline: &Pipeline, tasks: &[Task]) -> PipelineTime {
    let split = tasks.iter().any(|task| task.pass == Pass::Weight);
    let spans = spans(pipeline, tasks);
    let mut busy = vec![0.0; pipeline.devices];
    let (mut held, mut peak) = (vec![0; pipeline.devices], vec![0; pipeline.devices]);
    for task in tasks {
        let device = task.device;
        busy[device] += task.end - task.start;
        match task.pass {
            Pass::Forward => {
                held[device] += 1;
                peak[device] = peak[device].max(held[device]);
            }
            Pass::Backward if split => {}
            Pass::Backward | Pass::Weight => held[device] -= 1,
        }
    }
    PipelineTime {
        makespan: spans.iter().map(|span| span.1).fold(0.0, f64::max),
        period: spans
            .iter()
            .map(|(start, end)| end - start)
            .fold(0.0, f64::max),
        peak_in_flight: peak,
        busy,
    }
}
