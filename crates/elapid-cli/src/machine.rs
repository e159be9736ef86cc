//! What the machine says of itself: CPU, memory there is, memory this process holds.

/// The name of the CPU, where the system tells.
pub fn processor() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    line.split_once(':').map(|pair| pair.1.trim().to_string())
}

/// A size in `/proc/self/status` or `/proc/meminfo`, in bytes.
fn kib_line(path: &str, key: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(key))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// Bytes that this process holds now, where the system tells.
pub fn held_bytes() -> Option<u64> {
    kib_line("/proc/self/status", "VmRSS:")
}

/// The most bytes that this process ever held, where the system tells.
pub fn peak_bytes() -> Option<u64> {
    kib_line("/proc/self/status", "VmHWM:")
}

/// Forgets the peak so far, where the system lets it be forgotten.
pub fn reset_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// Bytes that this process may still take without swapping, where the system tells: what is free,
/// and what a limit of its group leaves.
pub fn free_bytes() -> Option<u64> {
    let free = kib_line("/proc/meminfo", "MemAvailable:")?;
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limit = number("/sys/fs/cgroup/memory.max");
    let used = number("/sys/fs/cgroup/memory.current");
    // Files that lie in memory are given up when somebody needs the room.
    let stat = std::fs::read_to_string("/sys/fs/cgroup/memory.stat").unwrap_or_default();
    let of_files = |line: &str| {
        let (key, value) = line.split_once(' ')?;
        matches!(key, "inactive_file" | "active_file").then(|| value.parse::<u64>().ok()).flatten()
    };
    let cached: u64 = stat.lines().filter_map(of_files).sum();
    let left = limit.zip(used).map(|(limit, used)| (limit + cached).saturating_sub(used));
    Some(left.map_or(free, |left| left.min(free)))
}
