//! What the machine says of itself: CPU, memory there is, memory this process holds.

use std::path::Path;
use sysinfo::{CpuRefreshKind, Disks, Pid, ProcessRefreshKind, ProcessesToUpdate, System};

/// The name of the CPU, where the system tells.
pub fn cpu() -> Option<String> {
    let mut system = System::new().ok()?;
    system.refresh_cpu_list(CpuRefreshKind::nothing());
    let name = system.cpus().first()?.brand().trim();
    (!name.is_empty()).then(|| name.to_string())
}

/// The system, with the memory of this process.
fn with_this_process() -> Option<(System, Pid)> {
    let (mut system, pid) = (System::new().ok()?, sysinfo::get_current_pid().ok()?);
    let kind = ProcessRefreshKind::nothing().with_memory().without_tasks();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), false, kind);
    Some((system, pid))
}

/// Bytes that this process holds now, where the system tells.
pub fn held_bytes() -> Option<u64> {
    let (system, pid) = with_this_process()?;
    Some(system.process(pid)?.memory())
}

/// Bytes of memory that the machine has, where the system tells.
pub fn total_bytes() -> Option<u64> {
    let mut system = System::new().ok()?;
    system.refresh_memory();
    Some(system.total_memory()).filter(|n_bytes| *n_bytes > 0)
}

/// Bytes that this process may still take without swapping, where the system tells: what is free,
/// and what a limit of its control group leaves.
pub fn free_bytes() -> Option<u64> {
    let (mut system, pid) = with_this_process()?;
    system.refresh_memory();
    let free = system.available_memory();
    // Files cached in memory are given up when somebody needs the room: only the rest counts.
    let limits = system.process(pid).and_then(|process| process.cgroup_limits());
    let limits = limits.or_else(|| system.cgroup_limits());
    let left = limits.map(|limits| limits.total_memory.saturating_sub(limits.rss));
    (system.total_memory() > 0).then(|| left.map_or(free, |left| left.min(free)))
}

/// The most bytes that this process ever held. Linux alone tells.
pub fn peak_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// Bytes that are free on the disk that holds `path`, where the system tells.
pub fn free_disk(path: &Path) -> Option<u64> {
    let path = path.canonicalize().ok()?;
    let disks = Disks::new_with_refreshed_list().ok()?;
    let holding = disks.iter().filter(|disk| path.starts_with(disk.mount_point()));
    let nearest = holding.max_by_key(|disk| disk.mount_point().as_os_str().len())?;
    Some(nearest.available_space())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_told_in_bytes() {
        let block = vec![1u8; 64 << 20];
        let held = held_bytes().unwrap();
        assert!(held > block.len() as u64, "{held}");
        let free = free_bytes().unwrap();
        assert!(free > 1 << 20 && free < 1 << 50, "{free}");
        // The peak is exact, what is held now may be off by some pages for each thread.
        assert!(peak_bytes().is_none_or(|peak| peak + (8 << 20) > held), "{held}");
    }
}
