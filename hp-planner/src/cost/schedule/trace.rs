//! A simulated schedule in the trace event format that Chrome's tracing page and Perfetto open.

use serde_json::json;

use super::{Pass, Timeline};

impl Timeline {
    /// The schedule as a JSON document of the Chrome trace event format: one thread per device, one complete event per
    /// pass, times in microseconds.
    ///
    /// # Examples
    /// ```
    /// use hp_planner::cost::schedule::{ChunkTimes, Pipeline};
    /// use hp_planner::Schedule;
    ///
    /// let times = ChunkTimes { forward: 1e-3, backward: 1e-3, weight: 1e-3 };
    /// let timeline = Pipeline::uniform(4, 1, 8, times, 0.0)?.simulate(Schedule::OneFOneB)?;
    /// let trace: serde_json::Value = serde_json::from_str(&timeline.chrome_trace()).unwrap();
    /// assert_eq!(trace["traceEvents"].as_array().unwrap().len(), 4 + 2 * 4 * 8);
    /// # Ok::<(), hp_planner::Error>(())
    /// ```
    pub fn chrome_trace(&self) -> String {
        let devices = self.summary.busy.len();
        let names = (0..devices).map(|device| {
            json!({"name": "thread_name", "ph": "M", "pid": 0, "tid": device, "args": {"name": format!("stage {device}")}})
        });
        let passes = self.tasks.iter().map(|task| {
            let (name, category) = match task.pass {
                Pass::Forward => ("F", "forward"),
                Pass::Backward => ("B", "backward"),
                Pass::Weight => ("W", "weight"),
            };
            json!({
                "name": format!("{name}{}", task.micro_batch),
                "cat": category,
                "ph": "X",
                "ts": task.start * 1e6,
                "dur": (task.end - task.start) * 1e6,
                "pid": 0,
                "tid": task.device,
                "args": {"micro_batch": task.micro_batch, "virtual_stage": task.stage},
            })
        });
        let events: Vec<_> = names.chain(passes).collect();
        json!({"traceEvents": events, "displayTimeUnit": "ms"}).to_string()
    }
}
