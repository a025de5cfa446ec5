//! Every bad field gives one line that names file, line, field, value and what is allowed.

use std::path::PathBuf;

use hp_planner::{ClusterSpec, ModelSpec, TrainingSpec};

fn cluster(text: &str) -> String {
    ClusterSpec::from_toml(text).unwrap_err().to_string()
}

#[test]
fn missing_file() {
    let error = ClusterSpec::from_path("/nonexistent/cluster.toml").unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("cannot open /nonexistent/cluster.toml: "),
        "{error}"
    );
}

#[test]
fn errors_of_a_file_name_the_file() {
    let path: PathBuf = [env!("CARGO_TARGET_TMPDIR"), "bad-cluster.toml"]
        .iter()
        .collect();
    std::fs::write(
        &path,
        "[[groups]]\ngpu = \"V100-16\"\nnodes = 0\ngpus_per_node = 1\n",
    )
    .unwrap();
    let error = ClusterSpec::from_path(&path).unwrap_err().to_string();
    assert_eq!(
        error,
        format!(
            "{}, line 3: field `groups[0].nodes` is 0, allowed is a count from 1 to 100000",
            path.display()
        )
    );
}

#[test]
fn malformed_text() {
    let error = cluster("[[groups]]\ngpu = \n");
    assert!(error.starts_with("line 2: field `gpu`: "), "{error}");
    let error = cluster("[[groups]]\ngpu = \"T4\"\nnodes = \"two\"\ngpus_per_node = 1\n");
    assert_eq!(
        error,
        "line 3: field `nodes`: invalid type: string \"two\", expected a whole number from 0 to 4294967295"
    );
    let error = cluster("[[groups]]\ngpu = \"T4\"\nnods = 2\n");
    assert!(
        error.starts_with("line 3: field `nods`: unknown field `nods`, expected one of"),
        "{error}"
    );
    let error = cluster("[[groups]]\ngpu = \"T4\"\nnodes = 2\n");
    assert!(error.contains("missing field `gpus_per_node`"), "{error}");
    for text in [
        "[[groups]]\ngpu = \n",
        "x",
        "[[groups]]\ngpu = \"T4\"\nnodes = \"two\"\n",
    ] {
        assert_eq!(cluster(text).lines().count(), 1);
    }
}

#[test]
fn bad_values() {
    let error = cluster("name = \"x\"\n");
    assert!(error.contains("field `groups` is empty"), "{error}");
    let error = cluster("[[groups]]\ngpu = \"T5\"\nnodes = 1\ngpus_per_node = 1\n");
    assert!(
        error.starts_with("line 2: field `groups[0].gpu` is \"T5\", allowed is an entry of gpu_types or one of K80, P100"),
        "{error}"
    );
    let error = cluster(
        "[[groups]]\ngpu = \"T4\"\nnodes = 1\ngpus_per_node = 1\nprice_per_gpu_hour = -1\n",
    );
    assert_eq!(
        error,
        "line 5: field `groups[0].price_per_gpu_hour` is -1, allowed is 0 to 10000 money per GPU hour"
    );
    // 80 bytes instead of 80 GiB.
    let error = cluster(
        "[[groups]]\ngpu = \"mine\"\nnodes = 1\ngpus_per_node = 1\n[[gpu_types]]\nname = \"mine\"\nmemory_gib = 7.45e-8\n\
         memory_bandwidth_gb_s = 900\npeak = { fp32 = 10 }\nintra = { bandwidth_gb_s = 10 }\n",
    );
    assert!(
        error.starts_with(
            "line 7: field `gpu_types[0].memory_gib` is 0.0000000745, allowed is 0.25 to 4096 GiB"
        ),
        "{error}"
    );
    let error = TrainingSpec::from_toml("global_batch = 0\n").unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("line 1: field `global_batch` is 0"),
        "{error}"
    );
    let error = ModelSpec::from_toml("name = \"empty\"\n").unwrap_err();
    assert!(
        error
            .to_string()
            .contains("a [transformer] table or [[layers]]"),
        "{error}"
    );
}

#[test]
fn huge_values() {
    let group = "[[groups]]\ngpu = \"T4\"\nnodes = 100000\ngpus_per_node = 256\n";
    assert_eq!(
        cluster(&group.repeat(168)),
        "line 1: field `groups` is of 4300800000 GPUs together, allowed is at most 1000000 GPUs"
    );
    assert_eq!(
        cluster(
            "[[groups]]\ngpu = \"T4\"\nnodes = 1\ngpus_per_node = 1\nprice_per_gpu_hour = 1e300\n"
        ),
        "line 5: field `groups[0].price_per_gpu_hour` is 1e300, allowed is 0 to 10000 money per GPU hour"
    );
    let model = "[transformer]\nlayers = 2\nhidden = 64\nheads = 4\nvocab = 10\n";
    for (field, text) in [
        ("ffn", "ffn = 4294967295"),
        ("experts", "experts = 4294967295\nexperts_per_token = 1"),
        (
            "latent.query_rank",
            "latent = { query_rank = 4294967295, kv_rank = 4, rope_dim = 4, value_dim = 4 }",
        ),
    ] {
        let error = ModelSpec::from_toml(&format!("{model}{text}\n")).unwrap_err();
        assert!(
            error.to_string().starts_with(&format!(
                "line 6: field `transformer.{field}` is 4294967295, allowed is a count from 0 to"
            )),
            "{error}"
        );
    }
}

#[test]
fn a_training_has_to_state_its_batch() {
    assert_eq!(
        TrainingSpec::from_toml("").unwrap_err().to_string(),
        "input: field `global_batch` is 0 or missing, allowed is a count from 1 to 1099511627776"
    );
    assert_eq!(
        TrainingSpec::from_toml("global_batch = 8\n").unwrap(),
        TrainingSpec::new(8, 1)
    );
}

#[test]
fn other_encodings_are_named_with_their_line() {
    let path: PathBuf = [env!("CARGO_TARGET_TMPDIR"), "latin1.toml"]
        .iter()
        .collect();
    std::fs::write(&path, b"[[groups]]\nzone = \"Z\xfcrich\"\n").unwrap();
    assert_eq!(
        ClusterSpec::from_path(&path).unwrap_err().to_string(),
        format!("{}, line 2: not UTF-8 text", path.display())
    );
}

#[test]
fn inputs_survive_a_round_trip() {
    let cluster = ClusterSpec::homogeneous("A100-80", 4, 8).unwrap();
    assert_eq!(
        ClusterSpec::from_json(&serde_json::to_string(&cluster).unwrap()).unwrap(),
        cluster
    );
    let model = ModelSpec::vit("vit", 12, 768, 12, 16, 197, 1000);
    assert_eq!(
        ModelSpec::from_json(&serde_json::to_string(&model).unwrap()).unwrap(),
        model
    );
    let training = TrainingSpec::new(256, 2048);
    assert_eq!(
        TrainingSpec::from_json(&serde_json::to_string(&training).unwrap()).unwrap(),
        training
    );
}
