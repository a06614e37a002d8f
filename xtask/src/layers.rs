//! Few layers, and nothing depends on its own layer or above.

use std::path::Path;
use std::process::Command;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand};

use crate::Error;

/// The layers, from the lowest. A crate that ships stands in exactly one of them.
const LAYERS: &[&[&str]] = &[
    // `winproc` is empty but on Windows (docs/adr/0033).
    &["rung", "winproc"],
    &["segment", "cuda", "link"],
    // What the rungs of device memory have in common (docs/adr/0030).
    &["cuda-memory"],
    &[
        "tier-cuda-ipc",
        "tier-pool-ipc",
        "tier-shm",
        "tier-numpy",
        "tier-pickle",
        "tier-inline",
        "canary",
        "worker",
    ],
    &["ladder"],
    &["ladder-cli"],
];

/// What never ships: may depend on anything, and nothing that ships on it, but for its tests.
const UNSHIPPED: &[&str] = &[
    "testkit",
    "cuda-standin",
    "gpu-check",
    "pool-model",
    "soak",
    "bench",
    "e2e",
    "examples",
    "xtask",
];

/// What a rung that moves host memory must not pull in.
const NOT_FOR_SHM: &[&str] = &["cudarc", "ndarray", "image", "clap", "shared_memory"];

fn layer(name: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&name))
}

/// Checks the workspace at a path.
pub(crate) fn check(root: &Path) -> Result<(), Error> {
    let metadata = MetadataCommand::new().current_dir(root).no_deps().exec()?;
    let wrong = violations(&metadata);
    if !wrong.is_empty() {
        return Err(wrong.join("\n").into());
    }
    let pulled = pulled_by(root, "tier-shm")?;
    let wrong: Vec<_> =
        NOT_FOR_SHM.iter().filter(|name| pulled.iter().any(|p| p == *name)).collect();
    if !wrong.is_empty() {
        return Err(format!("tier-shm alone pulls in {wrong:?}").into());
    }
    let packages = metadata.packages.len();
    println!(
        "{packages} packages in their layers; tier-shm alone pulls in {} crates",
        pulled.len()
    );
    Ok(())
}

/// Every dependency that goes sideways or up, in words.
fn violations(metadata: &Metadata) -> Vec<String> {
    let mut wrong = Vec::new();
    let ours: Vec<&str> = metadata.packages.iter().map(|package| package.name.as_str()).collect();
    for package in &metadata.packages {
        let name = package.name.as_str();
        let mine = layer(name);
        if mine.is_none() && !UNSHIPPED.contains(&name) {
            wrong.push(format!("{name} stands in no layer"));
        }
        for dependency in &package.dependencies {
            let other = dependency.name.as_str();
            if !ours.contains(&other) || other == name {
                continue;
            }
            let for_tests = dependency.kind == DependencyKind::Development;
            match (mine, layer(other)) {
                (Some(_), None) if !for_tests => {
                    wrong.push(format!("{name} ships and depends on {other}, which does not"));
                }
                // Tests too: a test of a lower layer that needs a higher one belongs in tests/.
                (Some(mine), Some(theirs)) if theirs >= mine => {
                    wrong
                        .push(format!("{name} (layer {mine}) depends on {other} (layer {theirs})"));
                }
                _ => {}
            }
        }
    }
    if let Some(testkit) = metadata.packages.iter().find(|package| *package.name == "testkit") {
        for dependency in &testkit.dependencies {
            if dependency.name.starts_with("tier-") {
                wrong.push(format!("testkit names {}", dependency.name));
            }
        }
    }
    wrong
}

/// The names of the crates that a package pulls in on Linux, from `cargo tree`.
fn pulled_by(root: &Path, package: &str) -> Result<Vec<String>, Error> {
    let output = Command::new(env!("CARGO"))
        .current_dir(root)
        .args(["tree", "--package", package, "--edges", "normal,build", "--prefix", "none"])
        .args(["--target", "x86_64-unknown-linux-gnu", "--format", "{p}"])
        .output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    let text = String::from_utf8(output.stdout)?;
    let mut names: Vec<String> =
        text.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect();
    names.sort();
    names.dedup();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A workspace of empty packages with these dependencies, as cargo reads it.
    fn planted(packages: &[(&str, &str)]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let members: Vec<String> = packages.iter().map(|(name, _)| format!("{name:?}")).collect();
        let manifest =
            format!("[workspace]\nresolver = \"3\"\nmembers = [{}]\n", members.join(","));
        fs::write(folder.path().join("Cargo.toml"), manifest).unwrap();
        for (name, dependencies) in packages {
            let path = folder.path().join(name);
            fs::create_dir_all(path.join("src")).unwrap();
            fs::write(path.join("src/lib.rs"), "").unwrap();
            let package =
                format!("[package]\nname = {name:?}\nversion = \"0.1.0\"\nedition = \"2024\"\n");
            fs::write(path.join("Cargo.toml"), package + dependencies).unwrap();
        }
        let metadata = MetadataCommand::new().current_dir(folder.path()).no_deps().exec().unwrap();
        violations(&metadata)
    }

    fn on(name: &str) -> String {
        format!("[dependencies]\n{name} = {{ path = \"../{name}\" }}\n")
    }

    #[test]
    fn a_house_in_order_passes() {
        let shm = on("rung") + "segment = { path = \"../segment\" }\n";
        assert_eq!(
            planted(&[("rung", ""), ("segment", &on("rung")), ("tier-shm", &shm)]),
            Vec::<String>::new()
        );
    }

    #[test]
    fn a_tier_that_names_a_tier_fails() {
        let wrong = planted(&[("tier-shm", ""), ("tier-inline", &on("tier-shm"))]);
        assert_eq!(wrong, ["tier-inline (layer 3) depends on tier-shm (layer 3)"]);
    }

    #[test]
    fn a_lower_layer_that_names_a_higher_one_fails() {
        let wrong = planted(&[("ladder", ""), ("segment", &on("ladder"))]);
        assert_eq!(wrong, ["segment (layer 1) depends on ladder (layer 4)"]);
        let optional = "[dependencies]\nlink = { path = \"../link\", optional = true }\n";
        let wrong = planted(&[("link", ""), ("rung", optional)]);
        assert_eq!(wrong, ["rung (layer 0) depends on link (layer 1)"]);
        let for_tests = on("ladder").replace("dependencies", "dev-dependencies");
        assert_eq!(planted(&[("ladder", ""), ("rung", &for_tests)]).len(), 1);
    }

    #[test]
    fn a_package_of_no_layer_fails() {
        assert_eq!(planted(&[("tier-fax", "")]), ["tier-fax stands in no layer"]);
        let wrong = planted(&[("testkit", ""), ("rung", &on("testkit"))]);
        assert_eq!(wrong, ["rung ships and depends on testkit, which does not"]);
        let wrong = planted(&[("tier-shm", ""), ("testkit", &on("tier-shm"))]);
        assert_eq!(wrong, ["testkit names tier-shm"]);
    }

    #[test]
    fn what_a_package_pulls_in_is_seen() {
        let names = pulled_by(&crate::root(), "ladder-cli").unwrap();
        for name in ["clap", "image", "rung"] {
            assert!(names.iter().any(|known| known == name), "{name}");
        }
    }
}
