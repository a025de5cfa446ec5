//! Calibration on rows whose times come from known constants.

use std::fmt::Write as _;

use hp_planner::{
    AnalyticCost, Calibration, Constants, Evaluator, FitKind, GpuType, Infeasible, MeasuredRow,
    Profile,
};

const HEADER: &str = "id,source,framework,model,layers,hidden,heads,seq,vocab,gpu,gpus,gpus_per_node,dp,tp,pp,mbs,gbs,recompute,precision,iter_s\n";

/// Rows over degrees, widths and micro-batches, with times that `constants` give, times `noise(index)`.
fn rows(constants: Constants, noise: impl Fn(usize) -> f64) -> Profile {
    let mut lines = Vec::new();
    for hidden in [1024, 2048, 4096] {
        for layers in [12, 24] {
            for (dp, tp, pp) in [
                (8, 1, 1),
                (4, 2, 1),
                (2, 4, 1),
                (1, 8, 1),
                (2, 2, 2),
                (4, 1, 2),
                (1, 4, 2),
            ] {
                for mbs in [1, 2, 4] {
                    lines.push(format!(
                        "r{},synthetic,test,GPT,{layers},{hidden},16,1024,50257,A100-80,8,8,{dp},{tp},{pp},{mbs},64,none,bf16",
                        lines.len()
                    ));
                }
            }
        }
    }
    let model = AnalyticCost::new().with_constants("A100-80", constants);
    let without = format!("{HEADER}{},\n", lines.join(",\n"));
    let cases = Profile::read(without.as_bytes(), None).unwrap();
    let mut text = HEADER.to_owned();
    for (index, (line, row)) in lines.iter().zip(&cases.rows).enumerate() {
        let case = row.case().unwrap();
        let time = model
            .time(&case.problem(), &case.configuration)
            .unwrap()
            .total();
        writeln!(text, "{line},{}", time * noise(index)).unwrap();
    }
    Profile::read(text.as_bytes(), None).unwrap()
}

/// A stack that is slower than the catalogue says (0.6 and 0.8) in products *and* memory: errors of opposite signs would
/// cancel in the sum of both times and hide what calibration has to find.
fn constants() -> Constants {
    Constants {
        gemm_efficiency: 0.48,
        memory_efficiency: 0.6,
        launch: 2e-5,
        intra_efficiency: 0.55,
        overhead: 0.015,
        ..Constants::of(GpuType::catalogue("A100-80").unwrap())
    }
}

fn halves(profile: &Profile) -> (Vec<&MeasuredRow>, Vec<&MeasuredRow>) {
    let inside = hp_planner::split(profile.rows.len(), 0.5, 3);
    let part = |wanted| {
        let rows = profile.rows.iter().zip(&inside);
        rows.filter(|(_, is)| **is == wanted)
            .map(|(row, _)| row)
            .collect()
    };
    (part(true), part(false))
}

fn error(calibration: &Calibration, rows: &[&MeasuredRow]) -> f64 {
    let mut evaluator = Evaluator::new();
    evaluator.add(calibration, rows);
    evaluator.finish().time["synthetic [one node]"].mape
}

#[test]
fn held_out_rows_are_predicted_from_fitted_constants() {
    let profile = rows(constants(), |_| 1.0);
    let (train, test) = halves(&profile);
    let calibration = Calibration::fit_rows(&train).unwrap();
    let fitted = error(&calibration, &test);
    let catalogue = error(&Calibration::catalogue(), &test);
    assert!(fitted < 0.01, "{fitted}");
    assert!(
        catalogue > 0.1 && catalogue > 20.0 * fitted,
        "{catalogue} {fitted}"
    );
    for (_, fit) in calibration.fits() {
        fit.constants.validate().unwrap();
    }
}

#[test]
fn few_rows_give_one_factor() {
    let profile = rows(constants(), |index| {
        1.0 + 0.05 * f64::from(u8::from(index % 2 == 0))
    });
    let train: Vec<&MeasuredRow> = profile.rows.iter().step_by(30).collect();
    assert!(train.len() < 6);
    let calibration = Calibration::fit_rows(&train).unwrap();
    assert_eq!(calibration.fits()[0].1.kind, FitKind::Utilisation);
}

#[test]
fn no_row_is_left_without_an_answer() {
    let text = "id,gpu,gpus,layers,hidden,heads,seq,vocab,dp,tp,pp,mbs,gbs,surprise\n\
                a,A100-80,8,24,1024,16,1024,50257,8,1,1,1,64,x\n\
                b,A100-80,8,24,1024,16,1024,50257,8,1,1,,64,x\n\
                c,A100-80,8,24,1024,16,1024,50257,8,1,1,3,64,x\n\
                d,T4,1,48,12288,96,2048,50257,1,1,1,8,8,x\n";
    let profile = Profile::read(text.as_bytes(), None).unwrap();
    let calibration = Calibration::catalogue();
    let reasons: Vec<Option<Infeasible>> = profile
        .rows
        .iter()
        .map(|row| calibration.predict(row).reason)
        .collect();
    assert_eq!(reasons[0], None);
    assert_eq!(
        reasons[1],
        Some(Infeasible::Unsupported("missing field mbs".to_owned()))
    );
    assert!(matches!(reasons[2], Some(Infeasible::Divisibility { .. })));
    assert!(matches!(reasons[3], Some(Infeasible::Memory { .. })));
}

#[test]
fn nothing_to_learn_from_is_an_error() {
    let profile = Profile::read("id,iter_s\na,1.0\n".as_bytes(), None).unwrap();
    let error = Calibration::fit(&profile).unwrap_err().to_string();
    assert!(
        error.starts_with("not enough data for calibration"),
        "{error}"
    );
}
