//! The program, as a person or a script runs it.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::path::PathBuf;
use std::process::{Command, ExitCode, Output};
#[cfg(target_os = "linux")]
use std::time::{Duration, Instant};

use serde_json::Value as Json;
use testkit::census::Census;
#[cfg(target_os = "linux")]
use testkit::hostile;
use testkit::{linux, run_serially, trial};

type Outcome = Result<(), String>;

const ROLE: &str = "RELAY_ROLE";

/// What the system says of a folder that is not there.
const NOWHERE: &str = if cfg!(windows) { "(os error 3)" } else { "(os error 2)" };

fn check(holds: bool, what: impl std::fmt::Debug) -> Outcome {
    if holds { Ok(()) } else { Err(format!("{what:?}")) }
}

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../examples/data").join(name)
}

fn ladder() -> Command {
    Command::new(env!("CARGO_BIN_EXE_ladder"))
}

fn relay(arguments: &[&str]) -> Output {
    ladder().arg("relay").args(arguments).output().unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// One clear line that names what and why, and this status.
fn fails(output: &Output, status: i32, says: &[&str]) -> Outcome {
    let line = err(output);
    check(output.status.code() == Some(status), (output.status, &line))?;
    check(line.lines().count() == 1 || status == 2, &line)?;
    check(output.stdout.is_empty(), out(output))?;
    check(!line.contains("panicked"), &line)?;
    says.iter().try_for_each(|part| check(line.contains(part), (part, &line)))
}

fn path(name: &str) -> String {
    data(name).to_string_lossy().into_owned()
}

/// On the stand-in of the driver, from its memory and back; without a driver, one line that says so.
fn files_cross_from_a_device() -> Outcome {
    let files = [path("astronaut.png"), path("mixed.safetensors")];
    let relay = |device: &str, on_stand_in: bool| {
        let mut command = ladder();
        #[cfg(target_os = "linux")]
        let variables = testkit::stand_in::environment().unwrap();
        #[cfg(not(target_os = "linux"))]
        let variables: [(&str, &str); 0] = [];
        if on_stand_in {
            command.envs(variables);
        }
        command.args(["relay", "--device", device]).args(&files).output().unwrap()
    };
    let output = relay("cuda:1", true);
    let table = out(&output);
    check(output.status.success(), (&table, err(&output)))?;
    let rode = |line: &&str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words.windows(2).any(|pair| pair == ["cuda-vmm", "0"])
    };
    check(table.lines().filter(rode).count() == 8, &table)?;
    fails(&relay("cuda:7", true), 1, &["cuda:7", "does not see this device"])?;
    fails(&relay("cuda:0", false), 1, &["cuda:0", "no CUDA driver"])
}

/// The README's first command.
fn real_files_cross_on_shared_memory() -> Outcome {
    let before = Census::take();
    let files = ["astronaut.png", "image_f32.npy", "mixed.safetensors"].map(path);
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let output = relay(&files);
    let table = out(&output);
    check(output.status.success(), err(&output))?;
    for part in
        ["astronaut.png $ ", "512×512×3", "f8_e4m3", "every result checked", "why not higher"]
    {
        check(table.contains(part), (part, &table))?;
    }
    for line in table.lines().filter(|line| line.contains('×') && !line.contains("0×7")) {
        check(line.contains(" shm "), line)?;
    }
    before.settle()
}

fn json(output: &Output) -> Result<Vec<Json>, String> {
    out(output)
        .lines()
        .map(|line| serde_json::from_str(line).map_err(|error| format!("{error}: {line}")))
        .collect()
}

fn scripts_read_json() -> Outcome {
    let output =
        relay(&["--json", "--repeat", "3", &path("mixed.safetensors"), &path("rocket.jpg")]);
    check(output.status.success(), err(&output))?;
    let lines = json(&output)?;
    let (closing, leaves) = lines.split_last().ok_or("no lines")?;
    check(
        closing["ok"] == true && closing["calls"] == 6 && closing["worker_pid"].is_u64(),
        closing,
    )?;
    check(leaves.len() == 9, leaves.len())?;
    for leaf in leaves {
        for key in ["path", "dtype", "shape", "bytes", "rung", "copies", "access", "us", "declined"]
        {
            check(!leaf[key].is_null(), (key, leaf))?;
        }
        let rung = if leaf["bytes"] == 0 { "inline" } else { "shm" };
        check(leaf["rung"] == rung, leaf)?;
    }
    check(leaves[1]["path"] == "$[\"image.bf16\"]" && leaves[1]["dtype"] == "bf16", &leaves[1])
}

fn a_negative_is_the_photos_negative() -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let written = folder.path().join("out.png");
    let output =
        relay(&[&path("astronaut.png"), "--op", "invert", "-o", written.to_str().unwrap()]);
    check(output.status.success(), err(&output))?;
    // The other way round it is the photo again.
    let twice = folder.path().join("twice.png");
    let output =
        relay(&[written.to_str().unwrap(), "--op", "invert", "-o", twice.to_str().unwrap()]);
    check(output.status.success(), err(&output))?;
    let stats = |file: &str| -> Result<Json, String> {
        let lines = json(&relay(&["--json", "--op", "stats", file]))?;
        Ok(lines.last().unwrap()["results"][0].clone())
    };
    let (photo, negative, again) = (
        stats(&path("astronaut.png"))?,
        stats(written.to_str().unwrap())?,
        stats(twice.to_str().unwrap())?,
    );
    check(photo == again, (&photo, &again))?;
    let sum = photo["mean"].as_f64().unwrap() + negative["mean"].as_f64().unwrap();
    check((sum - 255.0).abs() < 1e-6, sum)
}

fn what_is_written_reads_back() -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    for (input, output) in [
        ("image_fortran_f32.npy", "out.npy"),
        ("gray_f16.npy", "out.npy"),
        ("mask_bool.npy", "out.npy"),
        ("spectrum_c64.npy", "out.npy"),
        ("zero_d.npy", "out.npy"),
        ("empty_0x3.npy", "out.npy"),
        ("image_be_f4.npy", "out.npy"),
        ("times_ns.npy", "out.npy"),
        ("names_U8.npy", "out.npy"),
        ("vertices_record.npy", "out.npy"),
        ("nested_record.npy", "out.npy"),
        ("aligned_record.npy", "out.npy"),
        ("auto_named_record.npy", "out.npy"),
        ("mixed.safetensors", "out.safetensors"),
        ("plain_p0.pickle", "out.pickle"),
        ("unknown_class_p5.pickle", "out.pickle"),
        ("make.py", "out.bin"),
    ] {
        let written = folder.path().join(output);
        let run = relay(&[&path(input), "-o", written.to_str().unwrap()]);
        check(run.status.success(), (input, err(&run)))?;
        let leaves = |file: &str| -> Result<Vec<Json>, String> {
            let mut lines = json(&relay(&["--json", file]))?;
            for line in &mut lines {
                for key in ["us", "file", "worker_pid"] {
                    if let Some(object) = line.as_object_mut() {
                        object.remove(key);
                    }
                }
            }
            Ok(lines)
        };
        check(leaves(&path(input))? == leaves(written.to_str().unwrap())?, input)?;
    }
    // NumPy's own checksums of the arrays, made with NumPy.
    let expected: Json =
        serde_json::from_slice(&std::fs::read(data("expected.json")).unwrap()).unwrap();
    for name in ["image_f32.npy", "image_fortran_f32.npy"] {
        let written = folder.path().join("c.npy");
        check(relay(&[&path(name), "-o", written.to_str().unwrap()]).status.success(), name)?;
        let array = tier_numpy::npy::read(std::fs::read(&written).unwrap()).unwrap();
        let contents = testkit::sha256(&array.to_bytes().unwrap());
        check(contents == expected[name]["c_order_sha256"].as_str().unwrap(), name)?;
    }
    Ok(())
}

fn bad_files_are_one_clear_line() -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let read = |name: &str| std::fs::read(data(name)).unwrap();
    let half = |name: &str| {
        let bytes = read(name);
        bytes[..bytes.len() / 2].to_vec()
    };
    let mut wrong_type = read("mixed.safetensors");
    let at = wrong_type.windows(5).position(|window| window == b"\"F16\"").unwrap();
    wrong_type[at..at + 5].copy_from_slice(b"\"F99\"");
    let mut not_bool = read("mask_bool.npy");
    *not_bool.last_mut().unwrap() = 2;
    for (file, says) in [
        (folder.path().join("missing.png").to_str().unwrap().to_owned(), "(os error 2)"),
        (file("half.png", &half("astronaut.png")), "half.png"),
        (file("half.jpg", &half("rocket.jpg")[..200]), "half.jpg"),
        (
            file("half.npy", &half("image_f32.npy")),
            "98240 bytes of data, which is not shape [128, 128, 3]",
        ),
        (file("half.safetensors", &half("mixed.safetensors")), "half.safetensors"),
        (file("noise.png", &[7; 5000]), "noise.png"),
        (file("noise.npy", &[7; 5000]), "noise.npy"),
        (file("noise.safetensors", &[7; 5000]), "noise.safetensors"),
        (file("empty.npy", &[]), "empty.npy"),
        (file("type.safetensors", &wrong_type), "F99"),
        (file("bool.npy", &not_bool), "no value of the type"),
        (path("deep_20000_p2.pickle"), "nested too deeply"),
        (file("half.pickle", &half("plain_p4.pickle")), "cut at byte"),
    ] {
        fails(&relay(&[&file]), 1, &["ladder: ", says])?;
    }
    fails(&relay(&[&path("image_f32.npy"), "-o", "/no/such/folder/out.npy"]), 1, &[NOWHERE])?;
    fails(&relay(&[&path("image_f32.npy"), "-o", "out.mp3"]), 1, &["cannot be written as"])?;
    fails(
        &relay(&[&path("mixed.safetensors"), "--op", "invert"]),
        1,
        &["image.f8_e4m3", "invert is not known for f8_e4m3"],
    )
}

fn wrong_command_lines_are_status_2() -> Outcome {
    fails(&relay(&[]), 2, &["FILE"])?;
    fails(&relay(&["--op", "sharpen", "x"]), 2, &["sharpen"])?;
    fails(&relay(&["--repeat", "0", "x"]), 2, &["0"])?;
    fails(&relay(&["a", "b", "-o", "c"]), 2, &["--output takes the result of one file"])?;
    fails(&ladder().arg("dance").output().unwrap(), 2, &["dance"])
}

#[cfg(target_os = "linux")]
fn with_worker(role: &str, timeout: &str) -> Output {
    let this = std::env::current_exe().unwrap();
    ladder()
        .args(["relay", "--timeout", timeout, "--worker", this.to_str().unwrap()])
        .arg(data("astronaut.png"))
        .env(ROLE, role)
        .output()
        .unwrap()
}

/// Processes that were started with a role and still run.
#[cfg(target_os = "linux")]
fn survivors() -> Vec<String> {
    let ours = |process: &std::fs::DirEntry| {
        let environment = std::fs::read(process.path().join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|pair| pair.starts_with(ROLE.as_bytes()))
    };
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes.filter(ours).map(|process| process.path().display().to_string()).collect()
}

#[cfg(not(target_os = "linux"))]
fn bad_workers_are_one_clear_line() -> Outcome {
    let output = relay(&[&path("astronaut.png"), "--worker", "/no/such/program"]);
    fails(&output, 1, &["/no/such/program", "could not be started"])?;
    // This test, which knows nothing of links.
    let this = std::env::current_exe().unwrap();
    let output = ladder()
        .args(["relay", "--worker"])
        .arg(this)
        .arg(path("astronaut.png"))
        .env(ROLE, "ends")
        .output()
        .unwrap();
    fails(&output, 1, &["exited with status 0"])
}

#[cfg(target_os = "linux")]
fn bad_workers_are_one_clear_line() -> Outcome {
    let before = Census::take();
    let output = relay(&[&path("astronaut.png"), "--worker", "/no/such/program"]);
    fails(&output, 1, &["/no/such/program", "(os error 2)"])?;
    fails(&relay(&[&path("astronaut.png"), "--worker", "true"]), 1, &["exited with status 0"])?;
    for (kind, says, _) in hostile::KINDS {
        fails(&with_worker(kind, "30"), 1, &[says])?;
        check(survivors().is_empty(), (kind, survivors()))?;
    }
    for kind in hostile::SILENT {
        let started = Instant::now();
        let output = with_worker(kind, "0.3");
        check(started.elapsed() < Duration::from_secs(20), kind)?;
        let says = if matches!(*kind, "hangs-at-once" | "hangs-in-the-proof") {
            "no handshake within"
        } else {
            "the deadline passed"
        };
        fails(&output, 1, &[says])?;
        check(survivors().is_empty(), (kind, survivors()))?;
    }
    before.settle()
}

fn a_closed_pipe_is_no_panic() -> Outcome {
    let mut child = ladder()
        .args(["relay", &path("image_f32.npy"), "--repeat", "2"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    check(!err(&output).contains("panicked"), err(&output))?;
    check(output.status.code() == Some(1), output.status)
}

fn main() -> ExitCode {
    #[cfg(not(target_os = "linux"))]
    if std::env::var_os(ROLE).is_some() {
        return ExitCode::SUCCESS;
    }
    #[cfg(target_os = "linux")]
    if let Ok(role) = std::env::var(ROLE) {
        hostile::act(&role, || {
            let unproven = ladder::Channel::greet_from_env(&ladder::Ladder::standard(), None);
            let by_hand = unproven.unwrap().unwrap().prove_by_hand().unwrap();
            Box::new(move || by_hand.link().receive(None).ok().map(|frame| frame.json))
        });
    }
    run_serially(vec![
        trial("real_files_cross_on_shared_memory", real_files_cross_on_shared_memory),
        linux("files_cross_from_a_device", files_cross_from_a_device),
        trial("scripts_read_json", scripts_read_json),
        trial("a_negative_is_the_photos_negative", a_negative_is_the_photos_negative),
        trial("what_is_written_reads_back", what_is_written_reads_back),
        trial("bad_files_are_one_clear_line", bad_files_are_one_clear_line),
        trial("wrong_command_lines_are_status_2", wrong_command_lines_are_status_2),
        trial("bad_workers_are_one_clear_line", bad_workers_are_one_clear_line),
        trial("a_closed_pipe_is_no_panic", a_closed_pipe_is_no_panic),
    ])
}
