//! State by name: whole under any layout, in files that others read, and errors that name the tensor.

mod common;
#[path = "common/state.rs"]
mod state;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use common::{CnnTask, batch, one_device, run};
use iidp::reshard::{ModelSpec, RankState, StateLayout, TensorSpec};
use iidp::state_dict::StateTensor;
use iidp::{
    Communicator, Error, ExecutorConfig, LocalCommunicator, ParallelDims, ShardSpec, StateDict,
};
use proptest::prelude::*;
use state::{Random, assert_same_bits, on_ranks, random_layout, random_model, states};

/// A folder that is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("iidp-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

fn model() -> ModelSpec {
    let tensors = vec![
        TensorSpec::new("up.weight", [2, 4], ShardSpec::split(1), 0),
        TensorSpec::new("norm.mean", [3], ShardSpec::Replicated, 0).buffer(),
        TensorSpec::new("up.bias", [4], ShardSpec::split(0), 0),
    ];
    ModelSpec::new(tensors, ["moment_1", "moment_2"]).unwrap()
}

fn dict() -> StateDict {
    let trained = |from: usize| {
        (from..from + 12)
            .map(|i| i as f32 / 8.0)
            .collect::<Vec<_>>()
    };
    let whole = RankState::new(trained(1), vec![-1.5, f32::NAN, 0.1])
        .with_moment("moment_1", trained(100))
        .with_moment("moment_2", trained(200))
        .with_steps(vec![7, 1 << 40]);
    let mut dict = StateDict::from_whole(&model(), &whole).unwrap();
    dict.metadata
        .insert("epoch".into(), "3, \"quoted\" and \u{e9}".into());
    dict
}

/// Equality to the bit, also of NaNs.
fn assert_same(got: &StateDict, expected: &StateDict) {
    let bits = |values: &[f32]| {
        values
            .iter()
            .map(|value| value.to_bits())
            .collect::<Vec<_>>()
    };
    let tensors = |dict: &StateDict| {
        dict.tensors
            .iter()
            .map(|(name, tensor)| (name.clone(), tensor.shape.clone(), bits(&tensor.values)))
            .collect::<Vec<_>>()
    };
    let moments = |dict: &StateDict| {
        dict.moments
            .iter()
            .flat_map(|(moment, by_name)| {
                by_name
                    .iter()
                    .map(move |(name, values)| (moment.clone(), name.clone(), bits(values)))
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(tensors(got), tensors(expected));
    assert_eq!(moments(got), moments(expected));
    assert_eq!(got.steps, expected.steps);
    assert_eq!(got.metadata, expected.metadata);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Saved under one layout and loaded under another, every rank has its bits.
    #[test]
    fn a_file_carries_the_state_to_any_layout(seed in any::<u64>()) {
        let random = &mut Random(seed);
        let model = random_model(random);
        let (from, to) = (random_layout(random, &model), random_layout(random, &model));
        let folder = Folder::new(&format!("any-{seed}"));
        let path = folder.file("run.safetensors");
        let dict = StateDict::from_ranks(&from, &states(&from)).unwrap();
        dict.save(&path).unwrap();
        let loaded = StateDict::load(&path).unwrap();
        // A moment without parameters leaves no trace in a file.
        let mut kept = dict;
        kept.moments.retain(|_, by_name| !by_name.is_empty());
        assert_same(&loaded, &kept);
        assert_same_bits(&loaded.to_ranks(&to).unwrap(), &states(&to));
    }
}

#[test]
fn ranks_gather_and_scatter_it() {
    let model = std::sync::Arc::new(model());
    let layout = StateLayout::mesh(&model, ParallelDims::new(2, 2, 1), &[0])
        .unwrap()
        .with_sharded_moments()
        .unwrap();
    let before = states(&layout);
    let group = LocalCommunicator::group(4, Duration::from_secs(10)).unwrap();
    let other = StateDict::default();
    let results = on_ranks(group, |communicator| {
        let rank = communicator.rank();
        let dict = StateDict::gather(&communicator, &layout, &before[rank]).unwrap();
        assert_eq!(dict.is_some(), rank == 0);
        let after = StateDict::scatter(dict.as_ref(), &communicator, &layout).unwrap();
        // What rank 0 cannot hand out, nobody gets, and all can go on.
        let refusals = [
            StateDict::scatter(None, &communicator, &layout).unwrap_err(),
            StateDict::scatter(Some(&other), &communicator, &layout).unwrap_err(),
        ];
        communicator.barrier().unwrap();
        (after, refusals)
    });
    let mut after = Vec::new();
    for (rank, result) in results.into_iter().enumerate() {
        let (state, [nothing, unfit]) = result.unwrap();
        assert!(
            matches!(nothing, Error::ReshardRefused { rank: 0, .. }),
            "{nothing}"
        );
        let named = unfit.to_string() == "tensor up.weight: missing";
        assert_eq!(named, rank == 0, "{unfit}");
        after.push(state);
    }
    assert_same_bits(&after, &before);
}

#[test]
fn an_executor_goes_on_from_a_file() {
    let folder = Folder::new("executor");
    let path = folder.file("run.safetensors");
    let start = |steps| run(ExecutorConfig::new(one_device(4, 2)), CnnTask, steps, 3e-3).1;
    let (mut first, mut second) = (start(3), start(0));
    let state = first.state().unwrap();
    let dict = StateDict::from_executor(first.layout(), &state).unwrap();
    assert_eq!(dict.metadata["step"], "3");
    assert!(
        dict.tensors.len() > dict.steps.len(),
        "running statistics are stored too"
    );
    dict.save(&path).unwrap();
    let loaded = StateDict::load(&path).unwrap();
    second
        .restore(loaded.to_executor(second.layout()).unwrap())
        .unwrap();
    assert_eq!(second.state().unwrap(), state);
    let samples = batch(3, 8);
    let (a, b) = (
        first.step(&samples, 3e-3).unwrap(),
        second.step(&samples, 3e-3).unwrap(),
    );
    assert_eq!(a.loss, b.loss);
    let mut timeless = loaded;
    timeless.metadata.clear();
    let error = timeless
        .to_executor(second.layout())
        .unwrap_err()
        .to_string();
    assert_eq!(error, "tensor step: metadata None, expected a number");
}

/// The format's specification, byte by byte.
#[test]
fn files_have_the_format() {
    let folder = Folder::new("format");
    let path = folder.file("run.safetensors");
    let dict = dict();
    dict.save(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    assert_eq!(header_len % 8, 0, "the data are aligned");
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    assert_eq!(bytes[8], b'{');
    let data = &bytes[8 + header_len..];
    let mut places: Vec<_> = Vec::new();
    for (name, entry) in header.as_object().unwrap() {
        if name == "__metadata__" {
            assert_eq!(entry["epoch"], "3, \"quoted\" and \u{e9}");
            continue;
        }
        let [from, to] = [0, 1].map(|i| entry["data_offsets"][i].as_u64().unwrap() as usize);
        places.push((from, to));
        let shape: Vec<usize> = serde_json::from_value(entry["shape"].clone()).unwrap();
        if entry["dtype"] == "I64" {
            assert!(name.starts_with("optimizer.steps.") && shape.is_empty() && from % 8 == 0);
            let count = i64::from_le_bytes(data[from..to].try_into().unwrap());
            assert_eq!(count as u64, dict.steps[&name["optimizer.steps.".len()..]]);
            continue;
        }
        assert_eq!(entry["dtype"], "F32");
        let (parameter, expected) = match name.strip_prefix("optimizer.") {
            Some(rest) => {
                let (moment, parameter) = rest.split_once('.').unwrap();
                (parameter, &dict.moments[moment][parameter])
            }
            None => (name.as_str(), &dict.tensors[name].values),
        };
        assert_eq!(shape, dict.tensors[parameter].shape, "{name}");
        let expected: Vec<u8> = expected
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        assert_eq!(data[from..to], expected, "{name}");
    }
    places.sort_unstable();
    assert_eq!(places.len(), 3 + 2 * 2 + 2);
    assert_eq!((places[0].0, places.last().unwrap().1), (0, data.len()));
    assert!(
        places.windows(2).all(|pair| pair[0].1 == pair[1].0),
        "no gaps, no overlaps"
    );
    let again = folder.file("again.safetensors");
    dict.save(&again).unwrap();
    assert_eq!(
        fs::read(&again).unwrap(),
        bytes,
        "the same state gives the same bytes"
    );
    assert_same(&StateDict::load(&path).unwrap(), &dict);
}

/// Set `IIDP_PYTHON` to a Python that has `safetensors` and `numpy`: it reads what Rust has written, and Rust what it writes.
#[test]
fn python_reads_and_writes_it() {
    let Some(python) = std::env::var_os("IIDP_PYTHON") else {
        return;
    };
    let folder = Folder::new("python");
    let (ours, theirs) = (
        folder.file("ours.safetensors"),
        folder.file("theirs.safetensors"),
    );
    let dict = dict();
    dict.save(&ours).unwrap();
    let script = r#"
import sys, numpy
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
state = load_file(sys.argv[1])
with safe_open(sys.argv[1], "numpy") as f:
    metadata = f.metadata()
assert metadata["epoch"] == '3, "quoted" and \u00e9', metadata
assert sorted(state) == sorted(
    ["norm.mean"]
    + [prefix + name for name in ["up.bias", "up.weight"]
       for prefix in ["", "optimizer.steps.", "optimizer.moment_1.", "optimizer.moment_2."]]
), sorted(state)
assert state["up.weight"].shape == (2, 4) and state["up.weight"].dtype == numpy.float32
assert (state["up.weight"] == numpy.arange(1, 9).reshape(2, 4) / 8).all()
assert (state["optimizer.moment_2.up.bias"] == numpy.arange(208, 212) / 8).all()
assert state["optimizer.steps.up.bias"] == 1 << 40
assert numpy.isnan(state["norm.mean"][1])
save_file(state, sys.argv[2], metadata)
"#;
    let output = Command::new(python)
        .args(["-c", script])
        .args([&ours, &theirs])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_same(&StateDict::load(&theirs).unwrap(), &dict);
}

#[test]
fn a_state_that_does_not_fit_names_the_tensor() {
    let check = |change: &dyn Fn(&mut StateDict), expected: &str| {
        let mut dict = dict();
        change(&mut dict);
        let error = dict.to_whole(&model()).unwrap_err();
        assert!(matches!(error, Error::StateTensor { .. }));
        assert_eq!(error.to_string(), expected);
    };
    dict().to_whole(&model()).unwrap();
    dict().to_whole(&model()).unwrap();
    check(
        &|d| {
            d.tensors.remove("up.bias");
        },
        "tensor up.bias: missing",
    );
    check(
        &|d| {
            d.steps.remove("up.bias");
        },
        "tensor optimizer.steps.up.bias: missing",
    );
    check(
        &|d| {
            moment(d, "moment_2").remove("up.bias");
        },
        "tensor optimizer.moment_2.up.bias: missing",
    );
    check(
        &|d| {
            d.moments.remove("moment_1");
        },
        "tensor optimizer.moment_1.up.weight: missing",
    );
    check(
        &|d| {
            d.tensors
                .insert("down.weight".into(), StateTensor::default());
        },
        "tensor down.weight: not part of the model",
    );
    check(
        &|d| {
            moment(d, "velocity").insert("up.bias".into(), vec![0.0; 4]);
        },
        "tensor optimizer.velocity.up.bias: not part of the model",
    );
    check(
        &|d| {
            d.steps.insert("norm.mean".into(), 1);
        },
        "tensor optimizer.steps.norm.mean: not part of the model",
    );
    check(
        &|d| tensor(d, "up.weight").shape = vec![4, 2],
        "tensor up.weight: shape [4, 2], expected [2, 4]",
    );
    check(
        &|d| tensor(d, "up.weight").values.truncate(7),
        "tensor up.weight: 7 elements, expected 8 for shape [2, 4]",
    );
    check(
        &|d| {
            moment(d, "moment_1").insert("up.bias".into(), vec![0.0; 3]);
        },
        "tensor optimizer.moment_1.up.bias: 3 elements, expected 4 for shape [4]",
    );
}

fn tensor<'a>(dict: &'a mut StateDict, name: &str) -> &'a mut StateTensor {
    dict.tensors.get_mut(name).unwrap()
}

fn moment<'a>(dict: &'a mut StateDict, name: &str) -> &'a mut BTreeMap<String, Vec<f32>> {
    dict.moments.entry(name.into()).or_default()
}

#[test]
fn a_torn_file_names_the_tensor_and_no_cut_is_missed() {
    let folder = Folder::new("torn");
    let path = folder.file("run.safetensors");
    dict().save(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    for length in 0..bytes.len() {
        fs::write(&path, &bytes[..length]).unwrap();
        assert!(
            StateDict::load(&path).is_err(),
            "cut to {length} of {} bytes",
            bytes.len()
        );
    }
    let error = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        StateDict::load(&path).unwrap_err().to_string()
    };
    // The last tensor of the data is up.weight, of 32 bytes; before it come up.bias and, of 12 bytes, norm.mean.
    let ends = bytes.len();
    assert!(error(&bytes[..ends - 1]).starts_with("tensor up.weight: cut off: ends at byte "));
    assert!(error(&bytes[..ends - 33]).starts_with("tensor up.bias: cut off: ends at byte "));
    assert!(error(&[&bytes[..], b"x"].concat()).ends_with(": 1 bytes after the last tensor"));
    assert!(error(&bytes[..100]).contains("cut off, or not a safetensors file"));
    assert!(error(&bytes[..5]).ends_with("5 bytes, expected at least 8"));
    let swap = |from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let mut places = bytes.windows(from.len());
        let at = places.position(|window| window == from.as_bytes());
        let at = at.unwrap_or_else(|| panic!("{from} is not in the header"));
        let mut changed = bytes.clone();
        changed[at..at + to.len()].copy_from_slice(to.as_bytes());
        error(&changed)
    };
    assert!(swap("\"__metadata__\":{", "\"__metadata__\":[").contains(": header: "));
    assert_eq!(
        swap("\"shape\":[3]", "\"shape\":[2]"),
        "tensor norm.mean: bytes 112..124 for shape [2] of F32"
    );
    assert_eq!(
        swap("[112,124],\"dtype\":\"F32\"", "[112,124],\"dtype\":\"F16\""),
        "tensor norm.mean: F16, expected F32"
    );
    let missing = StateDict::load(folder.file("none")).unwrap_err();
    assert!(matches!(missing, Error::StateFile { .. }), "{missing}");
}

#[test]
fn what_was_there_stays_until_the_new_file_is_whole() {
    let folder = Folder::new("atomic");
    let path = folder.file("run.safetensors");
    let first = dict();
    first.save(&path).unwrap();
    let mut second = dict();
    tensor(&mut second, "up.bias").values.pop();
    let error = second.save(&path).unwrap_err().to_string();
    assert_eq!(
        error,
        "tensor up.bias: 3 elements, expected 4 for shape [4]"
    );
    assert_same(&StateDict::load(&path).unwrap(), &first);
    // A folder of that name cannot be replaced by a file.
    let folded = folder.file("folder");
    fs::create_dir_all(folded.join("inside")).unwrap();
    assert!(matches!(first.save(&folded), Err(Error::StateFile { .. })));
    let left: Vec<_> = fs::read_dir(&folder.0)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left.len(), 2, "nothing is left behind: {left:?}");
    for (change, expected) in [
        (("steps", "up.bias"), "tensor steps: a moment of that name"),
        (
            ("moment_1", "none"),
            "tensor optimizer.moment_1.none: a moment of no parameter",
        ),
    ] {
        let mut dict = dict();
        moment(&mut dict, change.0).insert(change.1.into(), vec![0.0; 4]);
        let error = dict.save(&path).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}
