//! Burn's back ends by name.

use crate::error::Error;
use burn::tensor::Device;
use std::fmt;
use std::str::FromStr;

/// A back end that ranks can compute on. Which ones exist depends on the crate's features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Backend {
    /// Burn's CPU back end; always there.
    #[default]
    Flex,
    /// GPUs through `WebGPU`; feature `wgpu`.
    Wgpu,
    /// NVIDIA GPUs; feature `cuda`.
    Cuda,
}

impl Backend {
    /// All devices of the back end, found by enumeration.
    ///
    /// # Errors
    /// [`Error::Setting`] if the crate was built without the back end, or if the machine has no such device.
    pub fn devices(self) -> Result<Vec<Device>, Error> {
        let found = match self {
            Self::Flex => vec![Device::flex()],
            Self::Wgpu => wgpu()?,
            Self::Cuda => cuda()?,
        };
        if found.is_empty() {
            return Err(Error::setting(
                "device",
                self,
                "a device of this kind, and the machine has none",
            ));
        }
        Ok(found)
    }
}

#[cfg(feature = "wgpu")]
#[allow(clippy::unnecessary_wraps, reason = "without the feature it fails")]
fn wgpu() -> Result<Vec<Device>, Error> {
    Ok(Device::enumerate(burn::tensor::DeviceType::Wgpu)
        .into_iter()
        .collect())
}

#[cfg(not(feature = "wgpu"))]
fn wgpu() -> Result<Vec<Device>, Error> {
    Err(Error::setting(
        "device",
        Backend::Wgpu,
        "build with `--features wgpu` to use it",
    ))
}

#[cfg(feature = "cuda")]
#[allow(clippy::unnecessary_wraps, reason = "without the feature it fails")]
fn cuda() -> Result<Vec<Device>, Error> {
    Ok(Device::enumerate(burn::tensor::DeviceType::Cuda)
        .into_iter()
        .collect())
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Result<Vec<Device>, Error> {
    Err(Error::setting(
        "device",
        Backend::Cuda,
        "build with `--features cuda` to use it",
    ))
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flex => "flex",
            Self::Wgpu => "wgpu",
            Self::Cuda => "cuda",
        })
    }
}

impl FromStr for Backend {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        [Self::Flex, Self::Wgpu, Self::Cuda]
            .into_iter()
            .find(|b| b.to_string() == name)
            .ok_or_else(|| Error::setting("device", name, "flex, wgpu or cuda"))
    }
}

#[cfg(test)]
mod tests {
    use super::Backend;

    #[test]
    fn names_are_read_back_and_others_refused() {
        for backend in [Backend::Flex, Backend::Wgpu, Backend::Cuda] {
            assert_eq!(backend.to_string().parse::<Backend>().unwrap(), backend);
        }
        assert_eq!(
            "tpu".parse::<Backend>().unwrap_err().to_string(),
            "device = tpu: flex, wgpu or cuda"
        );
        assert_eq!(Backend::Flex.devices().unwrap().len(), 1);
    }

    #[cfg(not(feature = "wgpu"))]
    #[test]
    fn a_back_end_that_was_not_built_says_how_to_get_it() {
        assert_eq!(
            Backend::Wgpu.devices().unwrap_err().to_string(),
            "device = wgpu: build with `--features wgpu` to use it"
        );
    }
}
