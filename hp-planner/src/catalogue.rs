//! Common GPUs. Rates, memory and bandwidth are those of the vendor's data sheets (dense, without sparsity, boost clock);
//! consumer cards state the tensor rate with 32-bit accumulation. Prices are on-demand list prices per GPU hour in US dollars,
//! rounded, of the large clouds' US regions in 2024-2026 where such an instance is offered: they are defaults to be overridden
//! per node group.

use std::sync::LazyLock;

use crate::cluster::{GpuType, Link, PeakRates};

static CATALOGUE: LazyLock<Vec<GpuType>> = LazyLock::new(build);

pub(crate) fn all() -> &'static [GpuType] {
    &CATALOGUE
}

pub(crate) fn find(name: &str) -> Option<&'static GpuType> {
    CATALOGUE
        .iter()
        .find(|gpu| gpu.name.eq_ignore_ascii_case(name))
}

/// name, GiB, GB/s, [fp32, tf32, fp16, bf16, fp8, fp4] TFLOP/s, link GB/s one way, link latency us, launch us, price.
type Row = (&'static str, f64, f64, [f64; 6], f64, f64, f64, Option<f64>);

#[rustfmt::skip]
const ROWS: &[Row] = &[
    ("K80",        12.0,  240.0, [4.1,   0.0,    0.0,    0.0,    0.0,    0.0],     10.0, 10.0, 8.0, Some(0.90)),
    ("P100",       16.0,  732.0, [10.6,  0.0,    21.2,   0.0,    0.0,    0.0],     80.0, 6.0,  6.0, Some(1.46)),
    ("P100-PCIE",  16.0,  732.0, [9.3,   0.0,    18.7,   0.0,    0.0,    0.0],     12.0, 8.0,  6.0, Some(1.46)),
    ("V100-16",    16.0,  900.0, [15.7,  0.0,    125.0,  0.0,    0.0,    0.0],     150.0, 5.0, 5.0, Some(3.06)),
    ("V100-32",    32.0,  900.0, [15.7,  0.0,    125.0,  0.0,    0.0,    0.0],     150.0, 5.0, 5.0, Some(3.90)),
    ("V100-PCIE",  16.0,  900.0, [14.0,  0.0,    112.0,  0.0,    0.0,    0.0],     12.0, 8.0,  5.0, Some(2.48)),
    ("T4",         16.0,  320.0, [8.1,   0.0,    65.0,   0.0,    0.0,    0.0],     12.0, 8.0,  6.0, Some(0.35)),
    ("RTX2080Ti",  11.0,  616.0, [13.4,  0.0,    53.8,   0.0,    0.0,    0.0],     12.0, 8.0,  5.0, Some(0.25)),
    ("RTX2080",    8.0,   448.0, [10.1,  0.0,    40.3,   0.0,    0.0,    0.0],     12.0, 8.0,  5.0, Some(0.20)),
    ("TITAN-RTX",  24.0,  672.0, [16.3,  0.0,    130.5,  0.0,    0.0,    0.0],     12.0, 8.0,  5.0, Some(0.45)),
    ("QUADRO-RTX6000", 24.0, 672.0, [16.3, 0.0,  130.5,  0.0,    0.0,    0.0],     12.0, 8.0,  5.0, Some(0.50)),
    ("A100-40",    40.0,  1555.0, [19.5, 156.0,  312.0,  312.0,  0.0,    0.0],     300.0, 5.0, 4.5, Some(3.67)),
    ("A100-80",    80.0,  2039.0, [19.5, 156.0,  312.0,  312.0,  0.0,    0.0],     300.0, 5.0, 4.5, Some(5.12)),
    ("A100-PCIE",  80.0,  1935.0, [19.5, 156.0,  312.0,  312.0,  0.0,    0.0],     25.0, 7.0,  4.5, Some(3.67)),
    ("A800-80",    80.0,  2039.0, [19.5, 156.0,  312.0,  312.0,  0.0,    0.0],     200.0, 5.0, 4.5, Some(3.67)),
    ("A10G",       24.0,  600.0, [31.5,  35.0,   70.0,   70.0,   0.0,    0.0],     25.0, 7.0,  4.5, Some(1.01)),
    ("A6000",      48.0,  768.0, [38.7,  77.4,   154.8,  154.8,  0.0,    0.0],     25.0, 7.0,  4.5, Some(0.80)),
    ("RTX3090",    24.0,  936.0, [35.6,  35.6,   71.0,   71.0,   0.0,    0.0],     25.0, 7.0,  4.5, Some(0.35)),
    ("RTX4090",    24.0,  1008.0, [82.6, 82.6,   165.2,  165.2,  330.3,  0.0],     25.0, 7.0,  4.0, Some(0.60)),
    ("L4",         24.0,  300.0, [30.3,  60.0,   121.0,  121.0,  242.0,  0.0],     25.0, 7.0,  4.0, Some(0.71)),
    ("L40S",       48.0,  864.0, [91.6,  183.0,  362.0,  362.0,  733.0,  0.0],     25.0, 7.0,  4.0, Some(1.86)),
    ("H100-80",    80.0,  3350.0, [67.0, 495.0,  989.0,  989.0,  1979.0, 0.0],     450.0, 4.0, 4.0, Some(6.88)),
    ("H100-PCIE",  80.0,  2039.0, [51.0, 378.0,  756.0,  756.0,  1513.0, 0.0],     50.0, 6.0,  4.0, Some(4.50)),
    ("H100-96",    96.0,  2400.0, [67.0, 495.0,  989.0,  989.0,  1979.0, 0.0],     450.0, 4.0, 4.0, Some(6.88)),
    ("H800-80",    80.0,  3350.0, [67.0, 495.0,  989.0,  989.0,  1979.0, 0.0],     200.0, 4.0, 4.0, Some(6.88)),
    ("GH200-96",   96.0,  4000.0, [67.0, 495.0,  989.0,  989.0,  1979.0, 0.0],     150.0, 4.0, 4.0, Some(11.06)),
    ("H200-141",   141.0, 4800.0, [67.0, 495.0,  989.0,  989.0,  1979.0, 0.0],     450.0, 4.0, 4.0, Some(7.91)),
    ("B200-180",   180.0, 8000.0, [75.0, 1125.0, 2250.0, 2250.0, 4500.0, 9000.0],  900.0, 4.0, 4.0, Some(14.24)),
    ("B300-288",   270.0, 8000.0, [75.0, 1125.0, 2250.0, 2250.0, 4500.0, 13500.0], 900.0, 4.0, 4.0, Some(17.80)),
    ("GB200-186",  186.0, 8000.0, [80.0, 1250.0, 2500.0, 2500.0, 5000.0, 10000.0], 900.0, 4.0, 4.0, Some(16.00)),
    ("GB300-279",  279.0, 8000.0, [80.0, 1250.0, 2500.0, 2500.0, 5000.0, 15000.0], 900.0, 4.0, 4.0, Some(19.00)),
    ("MI300X",     192.0, 5300.0, [163.4, 653.7, 1307.4, 1307.4, 2614.9, 0.0],     448.0, 6.0, 6.0, Some(7.86)),
];

fn build() -> Vec<GpuType> {
    ROWS.iter()
        .map(
            |&(name, memory_gib, bandwidth, peak, link, latency_us, launch_us, price)| {
                let [fp32, tf32, fp16, bf16, fp8, fp4] = peak;
                // Without tensor cores the data-sheet rate is nearer to what a matrix product reaches.
                let tensor_cores = fp16 > 3.0 * fp32;
                GpuType {
                    name: name.to_owned(),
                    memory_gib,
                    memory_bandwidth_gb_s: bandwidth,
                    peak: PeakRates {
                        fp32,
                        tf32,
                        fp16,
                        bf16,
                        fp8,
                        fp4,
                    },
                    compute_efficiency: if tensor_cores { 0.6 } else { 0.8 },
                    memory_efficiency: 0.8,
                    launch_us,
                    intra: Link::new(link, latency_us),
                    price_per_gpu_hour: price,
                }
            },
        )
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::ClusterSpec;

    #[test]
    fn every_entry_is_valid_and_distinct() {
        for (index, gpu) in all().iter().enumerate() {
            ClusterSpec::homogeneous(&gpu.name, 1, 1).unwrap();
            assert!(all()[..index].iter().all(|other| other.name != gpu.name));
        }
    }

    #[test]
    fn names_are_found_in_any_case() {
        assert_eq!(find("v100-16").unwrap().name, "V100-16");
        assert!(find("V100-17").is_none());
    }
}
