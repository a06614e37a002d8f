//! Real Python, with NumPy, on the other side of the files: what it writes is read here, and what is
//! written here it reads. `cargo xtask test-env` runs these in an environment of their own.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::path::Path;
use std::process::Command;

use ladder::{Array, Tensor};
use rung::Reason;
use serde::Serialize;

fn python(arguments: &[&str]) {
    let python = std::env::var("LADDER_PYTHON").unwrap_or_else(|_| "python3".into());
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/python/pickles.py");
    let output = Command::new(&python).arg(script).args(arguments).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{python} {arguments:?}: {error}");
}

fn written() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    python(&["write", folder.path().to_str().unwrap()]);
    folder
}

fn files(folder: &Path, start: &str, end: &str) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<(String, Vec<u8>)> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter_map(|path| {
            let name = path.file_name()?.to_str()?.to_owned();
            let wanted = name.starts_with(start) && name.ends_with(end);
            wanted.then(|| (name, std::fs::read(&path).unwrap()))
        })
        .collect();
    files.sort();
    files
}

#[derive(Serialize)]
enum Mode {
    Fast,
    Tiled(u8, u8),
}

#[derive(Serialize)]
struct Settings {
    name: String,
    weights: Vec<f32>,
    mode: Mode,
    plain: Mode,
    none: Option<u8>,
}

#[test]
#[ignore = "needs python3 with numpy"]
fn pickles_and_arrays_go_both_ways() {
    let folder = written();
    let at = |name: &str| folder.path().join(name);
    let plain = files(folder.path(), "value-", ".pickle");
    assert_eq!(plain.len(), 48);
    for (name, bytes) in plain {
        let value = tier_pickle::load(bytes).unwrap();
        assert!(value.as_pickle().is_none(), "{name} was not opened");
        std::fs::write(at(&format!("back-{name}")), tier_pickle::dump(&value).unwrap()).unwrap();
    }
    let shut = files(folder.path(), "shut-", ".pickle");
    assert_eq!(shut.len(), 66);
    for (name, bytes) in shut {
        let value = tier_pickle::load(bytes.clone()).unwrap();
        let pickle = value.as_pickle().unwrap_or_else(|| panic!("{name} was opened: {value:?}"));
        assert_eq!(*pickle.bytes().unwrap(), *bytes, "{name}");
        let why = tier_pickle::open(pickle).unwrap_err().reason();
        assert!(matches!(why, Reason::NotPlain | Reason::Recursive), "{name}: {why}");
    }
    let settings = Settings {
        name: "naïve".into(),
        weights: vec![0.5, 1.5],
        mode: Mode::Tiled(2, 3),
        plain: Mode::Fast,
        none: None,
    };
    let pickle = tier_pickle::to_pickle(&settings).unwrap();
    std::fs::write(at("struct.pickle"), pickle.bytes().unwrap()).unwrap();

    let arrays = files(folder.path(), "", ".npy");
    assert_eq!(arrays.len(), 20);
    for (name, bytes) in arrays {
        let stem = name.strip_suffix(".npy").unwrap();
        let array = tier_numpy::npy::read(bytes).unwrap();
        let back = std::fs::File::create(at(&format!("back-{name}"))).unwrap();
        tier_numpy::npy::write(&array, back).unwrap();
        let back = std::fs::File::create(at(&format!("back-{stem}.npz"))).unwrap();
        tier_numpy::npy::write_npz([(stem, &array)], back).unwrap();
    }
    for name in ["some.npz", "packed.npz"] {
        let archive =
            tier_numpy::npy::read_npz(std::fs::File::open(at(name)).unwrap(), 1 << 20).unwrap();
        for (name, array) in &archive {
            let alone = tier_numpy::npy::read(std::fs::read(at(&format!("{name}.npy"))).unwrap());
            assert_eq!(*array, alone.unwrap(), "{name}");
        }
        assert_eq!(archive.len(), 2);
    }
    python(&["read", folder.path().to_str().unwrap()]);
}

#[test]
#[ignore = "needs python3 with numpy"]
fn records_that_numpy_wrote_have_their_fields() {
    let folder = written();
    let record = tier_numpy::npy::read(std::fs::read(folder.path().join("record.npy")).unwrap());
    let record: Array = record.unwrap();
    let c: Tensor =
        record.field("a").unwrap().field("c").unwrap().to_tensor().unwrap_or_else(|_| {
            // Not every two bytes begin an i2 of 26-byte records; their bytes can still be had.
            let bytes = record.field("a").unwrap().field("c").unwrap().to_bytes().unwrap();
            Tensor::from_bytes(bytes, ladder::DType::I16, &[3, 3]).unwrap()
        });
    assert_eq!(c.to_vec::<i16>().unwrap(), [1, 2, 3, 1, 2, 3, 1, 2, 3]);
    let text = tier_numpy::npy::read(std::fs::read(folder.path().join("titled.npy")).unwrap());
    let text = text.unwrap();
    assert_eq!(text.field("a title").unwrap().to_bytes().unwrap(), [0; 8]);
    assert_eq!(text.descr().to_string(), "[(('a title', 'name'), '<f4'), ('naïve', '<U3')]");
}
