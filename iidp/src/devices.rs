//! Devices of this machine, by enumeration.

use burn::tensor::Device;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
use burn::tensor::DeviceType;

use crate::Error;

/// The first `count` devices of a kind: `"cpu"` (flex; as many logical devices as asked for), `"cuda"` or `"wgpu"`.
///
/// Nothing is computed on the devices, and none is taken by default: a process without a GPU gets an error, not a panic at
/// the first tensor.
///
/// # Errors
///
/// [`Error::NoDevices`] for a count of zero; [`Error::DeviceUnavailable`] for an unknown kind, a kind that this build has
/// no support for, or fewer devices than asked for.
///
/// # Examples
///
/// ```
/// assert_eq!(iidp::devices("cpu", 3)?.len(), 3);
/// let error = iidp::devices("abacus", 1).unwrap_err();
/// assert_eq!(error.to_string(), "abacus device: unknown kind, expected cpu, cuda or wgpu");
/// # Ok::<(), iidp::Error>(())
/// ```
pub fn devices(kind: &str, count: usize) -> Result<Vec<Device>, Error> {
    if count == 0 {
        return Err(Error::NoDevices);
    }
    let problem = match kind {
        "cpu" => return Ok(vec![Device::flex(); count]),
        #[cfg(feature = "cuda")]
        "cuda" => return enumerated(kind, DeviceType::Cuda, count),
        #[cfg(feature = "wgpu")]
        "wgpu" => return enumerated(kind, DeviceType::Wgpu, count),
        #[cfg(not(feature = "cuda"))]
        "cuda" => unsupported(kind),
        #[cfg(not(feature = "wgpu"))]
        "wgpu" => unsupported(kind),
        _ => "unknown kind, expected cpu, cuda or wgpu".to_owned(),
    };
    Err(Error::DeviceUnavailable {
        kind: kind.to_owned(),
        problem,
    })
}

#[cfg(not(all(feature = "cuda", feature = "wgpu")))]
fn unsupported(kind: &str) -> String {
    format!("this build does not support it, expected feature `{kind}`")
}

#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn enumerated(kind: &str, device_type: DeviceType, count: usize) -> Result<Vec<Device>, Error> {
    let found: Vec<Device> = Device::enumerate(device_type).into_iter().collect();
    if found.len() < count {
        let problem = format!(
            "found {}, expected {count}; is the driver installed and the device visible?",
            found.len()
        );
        return Err(Error::DeviceUnavailable {
            kind: kind.to_owned(),
            problem,
        });
    }
    Ok(found.into_iter().take(count).collect())
}
