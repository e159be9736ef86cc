//! Who may ask: the key, the Host and the Origin of a request.
//!
//! A server on a person's own machine is within reach of every web page that person opens. A page
//! cannot read answers of another origin, but it may send requests, and a name that points at this
//! machine only after the page was loaded (DNS rebinding) makes it the same origin. So:
//!
//! | check  | rule                                                                           |
//! |--------|--------------------------------------------------------------------------------|
//! | Host   | an address of this machine as it was bound, or a host of an allowed origin     |
//! | Origin | absent, the origin of the page this server gives out, or an allowed one        |
//! | key    | `Authorization: Bearer KEY` or `x-api-key: KEY`, where the server has keys     |
//!
//! Keys are compared by their hashes in constant time. There is no wildcard for origins.

use super::error::{Answered, ApiError};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use std::net::{IpAddr, SocketAddr};

/// Routes that need no key: they say nothing about anybody's text.
const OPEN_PATHS: [&str; 8] = [
    "/",
    "/page.css",
    "/page.js",
    "/markdown.js",
    "/studio",
    "/health",
    "/v1/health",
    "/favicon.ico",
];

const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

pub struct Guard {
    bound: SocketAddr,
    /// The host as a person typed it.
    host: String,
    keys: Vec<blake3::Hash>,
    /// Origins of other pages that may ask, in lower case.
    origins: Vec<String>,
}

impl Guard {
    pub fn new(bound: SocketAddr, host: &str, keys: &[String], origins: &[String]) -> Guard {
        let tidy = |origin: &String| origin.trim_end_matches('/').to_ascii_lowercase();
        Guard {
            bound,
            host: host.to_ascii_lowercase(),
            keys: keys.iter().map(|key| blake3::hash(key.as_bytes())).collect(),
            origins: origins.iter().map(tidy).collect(),
        }
    }

    /// The origin besides the server's own that may read the answer, or why it is refused.
    pub fn check(
        &self,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Answered<Option<HeaderValue>> {
        let host = host_of(uri, headers)?;
        self.check_host(&host)?;
        let origin = self.check_origin(&host, headers)?;
        let path = uri.path();
        let is_open = OPEN_PATHS.contains(&path) || path.starts_with("/studio/");
        if method != Method::OPTIONS && !is_open {
            self.check_key(headers)?;
        }
        Ok(origin)
    }

    fn check_host(&self, host: &str) -> Answered<()> {
        let name = without_port(host);
        let bare = name.trim_start_matches('[').trim_end_matches(']');
        let is_known = match bare.parse::<IpAddr>() {
            // Rebinding takes a name: where every address is bound, any address may be typed.
            Ok(ip) => ip == self.bound.ip() || ip.is_loopback() || self.bound.ip().is_unspecified(),
            Err(_) => name == "localhost" || name == self.host,
        };
        let of_origin = |origin: &String| {
            origin.split_once("://").is_some_and(|(_, host)| without_port(host) == name)
        };
        if is_known || self.origins.iter().any(of_origin) {
            return Ok(());
        }
        let words = format!(
            "the request is for the host `{host}`, and this server is {}; use its address, or \
             allow the host with --allow-origin http://{host}",
            self.bound
        );
        Err(ApiError::new(StatusCode::FORBIDDEN, words).with_code("wrong_host"))
    }

    /// The origin of another page, if it is allowed.
    fn check_origin(&self, host: &str, headers: &HeaderMap) -> Answered<Option<HeaderValue>> {
        let Some(value) = headers.get(header::ORIGIN) else { return Ok(None) };
        let origin = value.to_str().unwrap_or("").to_ascii_lowercase();
        if headers.get_all(header::ORIGIN).iter().count() == 1 {
            if origin.strip_prefix("http://") == Some(host) {
                return Ok(None);
            }
            if self.origins.contains(&origin) {
                return Ok(Some(value.clone()));
            }
        }
        let words = format!(
            "requests from pages of `{origin}` are not allowed; start the server with \
             --allow-origin ORIGIN to allow them"
        );
        Err(ApiError::new(StatusCode::FORBIDDEN, words).with_code("wrong_origin"))
    }

    fn check_key(&self, headers: &HeaderMap) -> Answered<()> {
        if self.keys.is_empty() {
            return Ok(());
        }
        let bearer = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
        let bearer = bearer.and_then(|value| match value.split_at_checked(7) {
            Some((scheme, key)) if scheme.eq_ignore_ascii_case(b"bearer ") => Some(key),
            _ => None,
        });
        let given = bearer.or_else(|| headers.get(API_KEY).map(HeaderValue::as_bytes));
        let Some(given) = given else {
            let words = "this server asks for a key; send `Authorization: Bearer KEY`";
            let error = ApiError::new(StatusCode::UNAUTHORIZED, words);
            return Err(error.with_code("missing_api_key"));
        };
        // Hashes of blake3 compare in constant time; no key ends the search early.
        let given = blake3::hash(given.trim_ascii());
        if self.keys.iter().filter(|key| **key == given).count() > 0 {
            return Ok(());
        }
        let words = "this key is not one of the server's";
        Err(ApiError::new(StatusCode::UNAUTHORIZED, words).with_code("invalid_api_key"))
    }
}

/// The host a request is for, in lower case.
fn host_of(uri: &Uri, headers: &HeaderMap) -> Answered<String> {
    let mut values = headers.get_all(header::HOST).iter();
    let (first, second) = (values.next(), values.next());
    let text = first.and_then(|value| value.to_str().ok()).filter(|_| second.is_none());
    let host = match (text, uri.authority()) {
        (Some(host), None) => host,
        (Some(host), Some(authority)) if authority.as_str() == host => host,
        _ => return Err(ApiError::bad("the request needs exactly one Host")),
    };
    Ok(host.trim().to_ascii_lowercase())
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// The answer to OPTIONS.
pub fn preflight(origin: Option<HeaderValue>) -> Response {
    const METHODS: &str = "GET, POST, OPTIONS";
    let Some(origin) = origin else {
        return (StatusCode::NO_CONTENT, [(header::ALLOW, METHODS)]).into_response();
    };
    let list = [
        (header::ALLOW, METHODS),
        (header::ACCESS_CONTROL_ALLOW_METHODS, METHODS),
        (header::ACCESS_CONTROL_ALLOW_HEADERS, "authorization, content-type, x-api-key"),
        (header::ACCESS_CONTROL_MAX_AGE, "600"),
    ];
    let mut response = (StatusCode::NO_CONTENT, list).into_response();
    allow(response.headers_mut(), origin);
    response
}

/// Lets a page of this origin read the answer.
pub fn allow(headers: &mut HeaderMap, origin: HeaderValue) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(header::VARY, HeaderValue::from_static("Origin"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(guard: &Guard, headers: &[(HeaderName, &str)]) -> u16 {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(name, HeaderValue::from_str(value).unwrap());
        }
        let uri = Uri::from_static("/slots");
        guard.check(&Method::GET, &uri, &map).map_or_else(|error| error.status.as_u16(), |_| 200)
    }

    fn guard(host: &str, keys: &[&str], origins: &[&str]) -> Guard {
        let owned = |list: &[&str]| list.iter().map(|text| text.to_string()).collect::<Vec<_>>();
        let bound = SocketAddr::new(host.parse().unwrap(), 8012);
        Guard::new(bound, host, &owned(keys), &owned(origins))
    }

    #[test]
    fn names_that_may_be_rebound_are_refused() {
        let guard = guard("127.0.0.1", &[], &[]);
        let host = |host: &str| status(&guard, &[(header::HOST, host)]);
        for good in ["127.0.0.1:8012", "localhost:8012", "LOCALHOST", "[::1]:8012", "127.0.0.1"] {
            assert_eq!(host(good), 200, "{good}");
        }
        for bad in ["evil.example:8012", "127.0.0.1.evil.example", "192.168.0.7:8012", "", "::1"] {
            assert_eq!(host(bad), 403, "{bad}");
        }
        assert_eq!(status(&guard, &[]), 400);
        let twice = [(header::HOST, "localhost"), (header::HOST, "evil.example")];
        assert_eq!(status(&guard, &twice), 400);
    }

    #[test]
    fn pages_of_others_may_not_ask_unless_allowed() {
        let guard = guard("127.0.0.1", &[], &["https://Editor.example/"]);
        let origin = |origin: &str| {
            status(&guard, &[(header::HOST, "localhost:8012"), (header::ORIGIN, origin)])
        };
        assert_eq!(origin("http://localhost:8012"), 200);
        assert_eq!(origin("https://editor.example"), 200);
        for bad in ["null", "", "http://evil.example", "http://localhost", "http://localhost:80"] {
            assert_eq!(origin(bad), 403, "{bad}");
        }
        assert_eq!(origin("https://localhost:8012"), 403);
        assert_eq!(origin("https://editor.example.evil"), 403);
    }

    #[test]
    fn a_key_is_asked_for_and_compared() {
        let guard = guard("127.0.0.1", &["one", "two"], &[]);
        let with = |name: HeaderName, value: &str| {
            status(&guard, &[(header::HOST, "localhost"), (name, value)])
        };
        assert_eq!(with(header::AUTHORIZATION, "Bearer one"), 200);
        assert_eq!(with(header::AUTHORIZATION, "bearer two"), 200);
        assert_eq!(with(API_KEY, "two"), 200);
        for bad in ["Bearer", "Bearer ", "Bearer on", "Bearer onee", "Basic one", "one", ""] {
            assert_eq!(with(header::AUTHORIZATION, bad), 401, "{bad}");
        }
        assert_eq!(with(API_KEY, ""), 401);
        assert_eq!(status(&guard, &[(header::HOST, "localhost")]), 401);
        assert_eq!(status(&guard, &[(header::HOST, "evil.example")]), 403);
    }

    #[test]
    fn every_address_may_be_typed_where_every_address_is_bound() {
        let guard = guard("0.0.0.0", &["k"], &["http://box.local:8012"]);
        let host = |host: &str| status(&guard, &[(header::HOST, host), (API_KEY, "k")]);
        assert_eq!(host("192.168.0.7:8012"), 200);
        assert_eq!(host("box.local:8012"), 200);
        assert_eq!(host("evil.example:8012"), 403);
    }
}
