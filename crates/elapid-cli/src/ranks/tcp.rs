//! Ranks that meet by TCP: each has a connection to every other.
//!
//! ```text
//! rank r to rank 0    "elapid-rank VERSION RANK N PORT\n"     PORT is where r listens
//! rank 0 to rank r    a line "ADDRESS:PORT" for each rank from 1 on
//! rank r to rank s    "elapid-rank VERSION RANK N PORT\n"     for 0 < s < r
//! ```
//!
//! Whoever reaches the port may say that it is a rank, as with torchrun: it belongs on a network of
//! one's own.

use super::launcher::Place;
use super::{gone, pause, silent};
use crate::report::{Done, Failure};
use elapid::{Error, Result};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// How long ranks wait for each other to be started.
const MEET: Duration = Duration::from_secs(120);
/// How long a connection may take to say who it is.
const HELLO: Duration = Duration::from_secs(5);
/// How long a rank stays after it has found another gone.
const LINGER: Duration = Duration::from_millis(500);
const LINE_BYTES_MAX: usize = 256;
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Connections to all other ranks.
pub struct Mesh {
    peers: Vec<Option<TcpStream>>,
}

fn cannot_meet(why: impl std::fmt::Display, place: &Place) -> Failure {
    let Place { rank, n_ranks, address, port } = place;
    let problem = format!("rank {rank} of {n_ranks} cannot meet the others at {address}:{port}");
    let hint = "check MASTER_ADDR, MASTER_PORT, WORLD_SIZE and the firewall, and that all ranks \
                were started";
    Failure::new(format!("{problem}: {why}"), hint)
}

/// A line, at most so long; bytes behind it stay where they are.
fn read_line(stream: &mut TcpStream) -> std::io::Result<String> {
    let mut line = Vec::new();
    let mut byte = [0];
    while line.len() < LINE_BYTES_MAX {
        stream.read_exact(&mut byte)?;
        if byte[0] == b'\n' {
            return String::from_utf8(line).map_err(|_| ErrorKind::InvalidData.into());
        }
        line.push(byte[0]);
    }
    Err(ErrorKind::InvalidData.into())
}

/// Rank and port that a connection names; none where it is no rank of this group.
fn hello(line: &str, place: &Place) -> Done<Option<(usize, u16)>> {
    let mut words = line.split(' ');
    if words.next() != Some("elapid-rank") {
        return Ok(None);
    }
    let version = words.next().unwrap_or_default();
    let mut number = || words.next().and_then(|word| word.parse::<usize>().ok());
    let (Some(rank), Some(n_ranks), Some(port)) = (number(), number(), number()) else {
        return Ok(None);
    };
    if version != VERSION {
        let problem = format!("rank {rank} runs version {version} of Elapid, not {VERSION}");
        return Err(Failure::new(problem, "start the same program everywhere"));
    }
    if n_ranks != place.n_ranks {
        let problem = format!("rank {rank} is one of {n_ranks}, not of {}", place.n_ranks);
        return Err(Failure::new(problem, "set the same WORLD_SIZE everywhere"));
    }
    let port = u16::try_from(port).ok().filter(|_| rank > 0 && rank < n_ranks);
    Ok(port.map(|port| (rank, port)))
}

impl Mesh {
    pub fn open(place: &Place) -> Done<Mesh> {
        let end = Instant::now() + MEET;
        let mut mesh = Mesh { peers: (0..place.n_ranks).map(|_| None).collect() };
        match place.rank {
            0 => mesh.receive_all(place, end)?,
            _ => mesh.visit(place, end)?,
        }
        for stream in mesh.peers.iter_mut().flatten() {
            let set = stream.set_nodelay(true).and_then(|()| stream.set_nonblocking(true));
            set.map_err(|error| cannot_meet(error, place))?;
        }
        Ok(mesh)
    }

    /// Rank 0: waits for everybody, then tells everybody where the others are.
    fn receive_all(&mut self, place: &Place, end: Instant) -> Done<()> {
        let listener = TcpListener::bind(("0.0.0.0", place.port))
            .or_else(|_| TcpListener::bind((&*place.address, place.port)))
            .map_err(|error| cannot_meet(error, place))?;
        let found = self.accept(&listener, place, place.n_ranks - 1, end)?;
        let mut table = vec![String::new(); place.n_ranks];
        for (rank, address) in found {
            table[rank] = address.to_string();
        }
        let text = format!("{}\n", table[1..].join("\n"));
        for stream in self.peers.iter_mut().flatten() {
            stream.write_all(text.as_bytes()).map_err(|error| cannot_meet(error, place))?;
        }
        Ok(())
    }

    /// Another rank: to rank 0, to those before it, and waits for those behind it.
    fn visit(&mut self, place: &Place, end: Instant) -> Done<()> {
        let fail = |error: std::io::Error| cannot_meet(error, place);
        let listener = TcpListener::bind(("0.0.0.0", 0)).map_err(fail)?;
        let port = listener.local_addr().map_err(fail)?.port();
        let hello = format!("elapid-rank {VERSION} {} {} {port}\n", place.rank, place.n_ranks);
        let mut first = loop {
            match connect(&format!("{}:{}", place.address, place.port)) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > end => return Err(cannot_meet(error, place)),
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        };
        first.write_all(hello.as_bytes()).map_err(fail)?;
        let left = end.saturating_duration_since(Instant::now());
        first.set_read_timeout(Some(left.max(HELLO))).map_err(fail)?;
        let lines = (1..place.n_ranks).map(|_| read_line(&mut first));
        let table = lines.collect::<std::io::Result<Vec<String>>>().map_err(fail)?;
        self.peers[0] = Some(first);
        for other in 1..place.rank {
            let mut stream = connect(&table[other - 1]).map_err(fail)?;
            stream.write_all(hello.as_bytes()).map_err(fail)?;
            self.peers[other] = Some(stream);
        }
        self.accept(&listener, place, place.n_ranks - 1 - place.rank, end)?;
        Ok(())
    }

    /// Waits for so many ranks; where each listens.
    fn accept(
        &mut self,
        listener: &TcpListener,
        place: &Place,
        n: usize,
        end: Instant,
    ) -> Done<Vec<(usize, SocketAddr)>> {
        let fail = |error: std::io::Error| cannot_meet(error, place);
        listener.set_nonblocking(true).map_err(fail)?;
        let mut found = Vec::new();
        while found.len() < n {
            let (mut stream, from) = match listener.accept() {
                Ok(pair) => pair,
                Err(_) if Instant::now() > end => {
                    let missing = self.peers.iter().enumerate().filter(|(_, peer)| peer.is_none());
                    let missing = missing.map(|(rank, _)| rank).filter(|rank| *rank != place.rank);
                    let list: Vec<String> = missing.map(|rank| rank.to_string()).collect();
                    let why = format!("nothing heard of ranks {}", list.join(", "));
                    return Err(cannot_meet(why, place));
                }
                Err(_) => {
                    std::thread::sleep(Duration::from_millis(10));
                    continue;
                }
            };
            let ready = stream
                .set_nonblocking(false)
                .and_then(|()| stream.set_read_timeout(Some(HELLO)))
                .and_then(|()| read_line(&mut stream));
            // Whoever says something else is no rank and is left alone.
            let Ok(line) = ready else { continue };
            let Some((rank, port)) = hello(&line, place)? else { continue };
            if rank == place.rank || self.peers[rank].replace(stream).is_some() {
                return Err(cannot_meet(format!("there are two ranks {rank}"), place));
            }
            found.push((rank, SocketAddr::new(from.ip(), port)));
        }
        Ok(found)
    }

    /// As [`elapid::Group`] says.
    pub fn exchange(
        &mut self,
        outgoing: &[&[u8]],
        incoming: &mut [&mut [u8]],
        timeout: Option<Duration>,
    ) -> Result<()> {
        let mut n_sent = vec![0; self.peers.len()];
        let mut n_got = vec![0; self.peers.len()];
        let (mut begin, mut n_idle) = (Instant::now(), 0);
        loop {
            let mut n_moved = 0;
            let mut waiting = Vec::new();
            for (rank, peer) in self.peers.iter_mut().enumerate() {
                let Some(stream) = peer else { continue };
                let rest = &outgoing[rank][n_sent[rank]..];
                if !rest.is_empty() {
                    let n = moved(stream.write(rest), rank)?;
                    n_sent[rank] += n;
                    n_moved += n;
                }
                let rest = &mut incoming[rank][n_got[rank]..];
                if !rest.is_empty() {
                    let n = moved(stream.read(rest), rank)?;
                    n_got[rank] += n;
                    n_moved += n;
                }
                if n_sent[rank] < outgoing[rank].len() || n_got[rank] < incoming[rank].len() {
                    waiting.push(rank);
                }
            }
            if waiting.is_empty() {
                return Ok(());
            }
            if n_moved > 0 {
                (begin, n_idle) = (Instant::now(), 0);
                continue;
            }
            if let Some(timeout) = timeout.filter(|timeout| begin.elapsed() > *timeout) {
                return Err(silent(&waiting, timeout));
            }
            pause(&mut n_idle);
        }
    }
}

/// Bytes that went; none where it must be tried again. An end is told after a while: whoever ends
/// because of it closes its own connections, and others are to hear of the first.
fn moved(done: std::io::Result<usize>, rank: usize) -> Result<usize> {
    match done {
        Ok(0) => {
            std::thread::sleep(LINGER);
            Err(gone(rank, "it closed its connection"))
        }
        Ok(n) => Ok(n),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            Ok(0)
        }
        Err(error) => {
            std::thread::sleep(LINGER);
            Err::<usize, Error>(gone(rank, &error.to_string()))
        }
    }
}

fn connect(address: &str) -> std::io::Result<TcpStream> {
    let mut last = ErrorKind::NotFound.into();
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, HELLO) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(rank: usize, n_ranks: usize, port: u16) -> Place {
        Place { rank, n_ranks, address: "127.0.0.1".into(), port }
    }

    fn free_port() -> u16 {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    }

    #[test]
    fn ranks_meet_and_each_message_comes_to_its_rank() {
        let port = free_port();
        let rank = move |rank: usize| {
            let mut mesh = Mesh::open(&place(rank, 3, port)).unwrap();
            let sent: Vec<Vec<u8>> =
                (0..3).map(|to| vec![(10 * rank + to) as u8; 70_000]).collect();
            let mut outgoing: Vec<&[u8]> = sent.iter().map(|bytes| &bytes[..]).collect();
            outgoing[rank] = &[];
            let mut got = vec![vec![0; 70_000]; 3];
            let mut incoming: Vec<&mut [u8]> = got.iter_mut().map(|bytes| &mut bytes[..]).collect();
            incoming[rank] = &mut [];
            mesh.exchange(&outgoing, &mut incoming, None).unwrap();
            for from in (0..3).filter(|from| *from != rank) {
                assert!(got[from].iter().all(|byte| *byte as usize == 10 * from + rank));
            }
        };
        let all: Vec<_> = (0..3).map(|n| std::thread::spawn(move || rank(n))).collect();
        // Somebody who is no rank is not taken for one.
        std::thread::spawn(move || connect(&format!("127.0.0.1:{port}"))?.write_all(b"GET /\n"));
        all.into_iter().for_each(|thread| thread.join().unwrap());
    }

    #[test]
    fn a_rank_that_ends_or_hangs_is_named() {
        let port = free_port();
        let other = std::thread::spawn(move || Mesh::open(&place(1, 2, port)).unwrap());
        let mut mesh = Mesh::open(&place(0, 2, port)).unwrap();
        let other = other.join().unwrap();
        let mut wait = || {
            let mut got = [0; 4];
            let incoming: &mut [&mut [u8]] = &mut [&mut [], &mut got];
            mesh.exchange(&[&[], &[]], incoming, Some(Duration::from_millis(20)))
        };
        let hung = wait().unwrap_err().to_string();
        assert!(hung.contains("no answer from rank 1"), "{hung}");
        drop(other);
        let ended = wait().unwrap_err().to_string();
        assert!(ended.contains("rank 1 has ended"), "{ended}");
    }

    #[test]
    fn ranks_of_another_version_or_group_are_refused() {
        let place = place(0, 2, 1);
        let refusal = |line: &str| hello(line, &place).unwrap_err().problem;
        assert!(refusal("elapid-rank 0.0.0 1 2 4000").contains("version 0.0.0"));
        assert!(refusal(&format!("elapid-rank {VERSION} 1 3 4000")).contains("one of 3"));
        let fine = hello(&format!("elapid-rank {VERSION} 1 2 4000"), &place).unwrap();
        assert_eq!(fine, Some((1, 4000)));
        for line in ["", "GET / HTTP/1.1", "elapid-rank", &format!("elapid-rank {VERSION} 2 2 1")] {
            assert_eq!(hello(line, &place).unwrap(), None, "{line}");
        }
    }
}
