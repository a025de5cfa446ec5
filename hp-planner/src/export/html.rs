//! The front as a picture: hand-written SVG, and a page around it that needs nothing else.

use std::fmt::Write;

use crate::report::PlanReport;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 90.0;
const BOTTOM: f64 = 60.0;
const MARGIN: f64 = 24.0;

/// The front as an SVG document: time to the right, money upwards, the point `chosen` (its index) marked.
///
/// Every point carries its plan as a tooltip.
pub fn svg(report: &PlanReport, chosen: Option<usize>) -> String {
    let points = report.front.points();
    let range = |of: fn(&crate::FrontPoint<crate::ParallelPlan>) -> f64| {
        let low = points.iter().map(of).fold(f64::INFINITY, f64::min);
        let high = points.iter().map(of).fold(f64::NEG_INFINITY, f64::max);
        let room = if high > low {
            0.05 * (high - low)
        } else {
            high.abs().max(1e-9) * 0.05
        };
        (low - room, high + room)
    };
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" \
         font-family=\"sans-serif\" font-size=\"12\"><title>Pareto front of {}</title>",
        escaped(&report.model)
    );
    if points.is_empty() {
        out.push_str("<text x=\"20\" y=\"40\">no feasible plan</text></svg>");
        return out;
    }
    let (times, costs) = (range(|p| p.time), range(|p| p.cost));
    let x = |time: f64| LEFT + (time - times.0) / (times.1 - times.0) * (WIDTH - LEFT - MARGIN);
    let y = |cost: f64| {
        HEIGHT - BOTTOM - (cost - costs.0) / (costs.1 - costs.0) * (HEIGHT - BOTTOM - MARGIN)
    };
    let (right, top, floor) = (WIDTH - MARGIN, MARGIN, HEIGHT - BOTTOM);
    // Writing to a string cannot fail.
    let mut draw = |args: std::fmt::Arguments<'_>| {
        let _ = out.write_fmt(args);
    };
    draw(format_args!(
        "<path d=\"M{LEFT} {top}V{floor}H{right}\" fill=\"none\" stroke=\"#555\"/>"
    ));
    for step in 0..=4 {
        let share = f64::from(step) / 4.0;
        let (time, cost) = (
            times.0 + share * (times.1 - times.0),
            costs.0 + share * (costs.1 - costs.0),
        );
        draw(format_args!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{time:.4}</text>",
            x(time),
            floor + 18.0
        ));
        draw(format_args!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{cost:.5}</text>",
            LEFT - 6.0,
            y(cost) + 4.0
        ));
    }
    draw(format_args!(
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">seconds per iteration</text>",
        f64::midpoint(LEFT, right),
        HEIGHT - 18.0
    ));
    draw(format_args!(
        "<text x=\"16\" y=\"{:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 16 {:.1})\">money per iteration</text>",
        f64::midpoint(top, floor),
        f64::midpoint(top, floor)
    ));
    // A front is a staircase: between two points nothing better than the first's money is known.
    let mut path = String::new();
    for (index, point) in points.iter().enumerate() {
        let (px, py) = (x(point.time), y(point.cost));
        let _ = if index == 0 {
            write!(path, "M{px:.1} {py:.1}")
        } else {
            write!(path, "H{px:.1}V{py:.1}")
        };
    }
    draw(format_args!(
        "<path d=\"{path}\" fill=\"none\" stroke=\"#4878a8\" stroke-width=\"1.5\"/>"
    ));
    for (index, point) in points.iter().enumerate() {
        let (radius, colour) = if chosen == Some(index) {
            (7, "#d05020")
        } else {
            (4, "#4878a8")
        };
        let dims = &point.payload.configuration.dims;
        draw(format_args!(
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"{radius}\" fill=\"{colour}\"><title>{}: dp {} tp {} pp {}, {:.4} s, {:.6}</title></circle>",
            x(point.time),
            y(point.cost),
            escaped(&report.devices(&point.payload)),
            dims.dp,
            dims.tp,
            dims.pp,
            point.time,
            point.cost
        ));
    }
    out.push_str("</svg>");
    out
}

/// A self-contained page: the picture and the table of the plans.
pub fn html(report: &PlanReport, chosen: Option<usize>) -> String {
    let mut rows = String::new();
    for (index, point) in report.front.iter().enumerate() {
        let configuration = &point.payload.configuration;
        let dims = &configuration.dims;
        let class = if chosen == Some(index) {
            " class=\"chosen\""
        } else {
            ""
        };
        let _ = write!(
            rows,
            "<tr{class}><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.4}</td><td>{:.6}</td><td>{:.2}</td></tr>",
            escaped(&report.devices(&point.payload)),
            dims.dp,
            dims.tp,
            dims.pp,
            dims.vpp,
            configuration.micro_batch,
            configuration.zero,
            point.time,
            point.cost,
            point.payload.estimate.peak_memory() / crate::cluster::GIB
        );
    }
    let title = format!("{} on {}", escaped(&report.model), escaped(&report.cluster));
    format!(
        "<!DOCTYPE html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title><style>\
         body{{font-family:sans-serif;max-width:60em;margin:2em auto}}table{{border-collapse:collapse;width:100%}}\
         td,th{{padding:.25em .6em;text-align:right;border-bottom:1px solid #ddd}}td:first-child,th:first-child{{text-align:left}}\
         .chosen{{background:#fbe9e0}}</style></head><body><h1>{title}</h1>\
         <p>Global batch {}; {} configurations examined, {} on the front. Predicted values.</p>{}\
         <table><tr><th>devices</th><th>dp</th><th>tp</th><th>pp</th><th>vpp</th><th>micro-batch</th><th>ZeRO</th>\
         <th>s/iteration</th><th>money/iteration</th><th>GiB</th></tr>{rows}</table></body></html>\n",
        report.global_batch,
        report.examined,
        report.front.len(),
        svg(report, chosen)
    )
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
