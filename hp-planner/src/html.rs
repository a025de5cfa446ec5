//! The front as a self-contained page: an SVG plot and a table.

use std::fmt::Write as _;

use crate::pareto::Objective;
use crate::report::PlanReport;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const MARGIN: f64 = 70.0;

impl PlanReport {
    /// A self-contained HTML page: the front plotted as SVG with the point that `objective` asks for marked, and the table of plans.
    pub fn to_html(&self, objective: Objective) -> String {
        let chosen = self.select(objective).map(|choice| choice.index).ok();
        let points = self.front.points();
        let range = |values: &mut dyn Iterator<Item = f64>| {
            let (low, high) = values.fold((f64::INFINITY, 0.0_f64), |(low, high), value| {
                (low.min(value), high.max(value))
            });
            let pad = if high > low {
                0.05 * (high - low)
            } else {
                0.1 * high
            };
            (low - pad, high + pad)
        };
        let times = range(&mut points.iter().map(|point| point.time));
        let costs = range(&mut points.iter().map(|point| point.cost));
        let place = |value: f64, (low, high): (f64, f64), length: f64| {
            MARGIN + (value - low) / (high - low) * (length - 2.0 * MARGIN)
        };
        let mut svg = String::new();
        for step in 0..=4 {
            let share = f64::from(step) / 4.0;
            let time = times.0 + share * (times.1 - times.0);
            let cost = costs.0 + share * (costs.1 - costs.0);
            let (x, y) = (
                place(time, times, WIDTH),
                HEIGHT - place(cost, costs, HEIGHT),
            );
            let _ = write!(
                svg,
                "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{time:.4}</text>\
                 <text x=\"{:.1}\" y=\"{y:.1}\" text-anchor=\"end\">{cost:.3e}</text>",
                HEIGHT - MARGIN + 20.0,
                MARGIN - 8.0,
            );
        }
        let mut line = String::new();
        for (index, point) in points.iter().enumerate() {
            let x = place(point.time, times, WIDTH);
            let y = HEIGHT - place(point.cost, costs, HEIGHT);
            let _ = write!(line, "{x:.1},{y:.1} ");
            let (radius, colour) = if chosen == Some(index) {
                (8, "#c0392b")
            } else {
                (5, "#2c5f8a")
            };
            let _ = write!(
                svg,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{colour}\"><title>{}: {:.6} s, {:.8}</title></circle>",
                escaped(&self.devices(&point.payload)),
                point.time,
                point.cost
            );
        }
        let mut rows = String::new();
        for (index, point) in points.iter().enumerate() {
            let class = if chosen == Some(index) {
                " class=\"chosen\""
            } else {
                ""
            };
            let dims = &point.payload.configuration.dims;
            let _ = writeln!(
                rows,
                "<tr{class}><td>{}</td><td>{} x {} x {}</td><td>{}</td><td>{:.6}</td><td>{:.8}</td></tr>",
                escaped(&self.devices(&point.payload)),
                dims.dp,
                dims.tp,
                dims.pp,
                point.payload.configuration.micro_batch,
                point.time,
                point.cost
            );
        }
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title><style>\
             body{{font:14px sans-serif;margin:2em}}table{{border-collapse:collapse}}td,th{{padding:.3em .8em;text-align:left}}\
             .chosen{{font-weight:bold;color:#c0392b}}text{{font:12px sans-serif}}</style></head><body>\n\
             <h1>{title}</h1>\n<svg width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\" aria-label=\"Pareto front\">\
             <rect x=\"{MARGIN}\" y=\"{MARGIN}\" width=\"{:.0}\" height=\"{:.0}\" fill=\"none\" stroke=\"#999\"/>\
             <polyline points=\"{}\" fill=\"none\" stroke=\"#2c5f8a\"/>{svg}\
             <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\">seconds per iteration</text>\
             <text x=\"{MARGIN}\" y=\"{:.0}\">money per iteration</text></svg>\n\
             <table><tr><th>devices</th><th>dp x tp x pp</th><th>micro-batch</th><th>s/iteration</th><th>money/iteration</th></tr>\n{rows}</table>\n\
             <p>{} configurations examined; choice: {objective}.</p></body></html>\n",
            WIDTH - 2.0 * MARGIN,
            HEIGHT - 2.0 * MARGIN,
            line.trim_end(),
            WIDTH / 2.0,
            HEIGHT - 20.0,
            MARGIN - 20.0,
            self.examined,
            title = escaped(&format!(
                "{} on {}, global batch {}",
                self.model, self.cluster, self.global_batch
            )),
        )
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::ClusterSpec;
    use crate::model::ModelSpec;
    use crate::planner::Planner;
    use crate::training::TrainingSpec;

    #[test]
    fn the_page_shows_every_plan_and_escapes_names() {
        let planner = Planner::new(
            ClusterSpec::homogeneous("A100-80", 1, 4).unwrap(),
            ModelSpec::gpt("<gpt>", 12, 768, 12, 50_257, 1024),
            TrainingSpec::new(64, 1024).data_parallel(2),
        );
        let report = planner.plan().unwrap();
        let html = report.to_html(Objective::Knee);
        assert_eq!(html.matches("<circle").count(), report.front.len());
        assert_eq!(html.matches("class=\"chosen\"").count(), 1);
        assert!(html.contains("&lt;gpt&gt;") && !html.contains("<gpt>") && !html.contains("NaN"));
    }
}
