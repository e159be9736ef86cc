//! Dates for templates that print today's: `strftime`, in English, of a time that is passed in.
//!
//! Days of the week follow from the date (proleptic Gregorian, Sakamoto's method). Not here: a
//! clock, time zones.

/// A local date and time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moment {
    /// Year, such as 2026.
    pub year: i32,
    /// Month, 1 to 12.
    pub month: u32,
    /// Day of the month, 1 to 31.
    pub day: u32,
    /// Hour, 0 to 23.
    pub hour: u32,
    /// Minute.
    pub minute: u32,
    /// Second.
    pub second: u32,
}

const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Days before each month in a common year.
const DAYS_BEFORE: [u32; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];

impl Moment {
    /// 0 is Sunday.
    fn weekday(&self) -> usize {
        const OFFSETS: [i64; 12] = [0, 3, 2, 5, 0, 3, 5, 1, 4, 6, 2, 4];
        let year = i64::from(self.year) - i64::from(self.month < 3);
        let days = year + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
        (days + OFFSETS[self.month_idx()] + i64::from(self.day)).rem_euclid(7) as usize
    }

    fn month_idx(&self) -> usize {
        (self.month.clamp(1, 12) - 1) as usize
    }

    /// Day of the year, from 1.
    fn yearday(&self) -> u32 {
        let is_leap =
            self.year % 4 == 0 && (self.year % 100 != 0 || self.year % 400 == 0) && self.month > 2;
        DAYS_BEFORE[self.month_idx()] + self.day + u32::from(is_leap)
    }

    /// What Python's `strftime` gives in the C locale; an unknown directive stays as it is.
    pub(super) fn format(&self, format: &str) -> String {
        let mut out = String::new();
        let mut chars = format.chars().peekable();
        while let Some(ch) = chars.next() {
            if ch != '%' {
                out.push(ch);
                continue;
            }
            // `%-d` drops the leading zero.
            let unpadded = chars.next_if_eq(&'-').is_some();
            let Some(directive) = chars.next() else {
                out.push_str(if unpadded { "%-" } else { "%" });
                break;
            };
            match self.directive(directive) {
                Some(text) if unpadded => {
                    let short = text.trim_start_matches(['0', ' ']);
                    out.push_str(if short.is_empty() { "0" } else { short });
                }
                Some(text) => out.push_str(&text),
                None => {
                    out.push_str(if unpadded { "%-" } else { "%" });
                    out.push(directive);
                }
            }
        }
        out
    }

    fn directive(&self, directive: char) -> Option<String> {
        let (day, month) = (DAYS[self.weekday()], MONTHS[self.month_idx()]);
        let hour_12 = (self.hour + 11) % 12 + 1;
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year.rem_euclid(100)),
            'm' => format!("{:02}", self.month),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'H' => format!("{:02}", self.hour),
            'I' => format!("{hour_12:02}"),
            'M' => format!("{:02}", self.minute),
            'S' => format!("{:02}", self.second),
            'f' => "000000".to_string(),
            'j' => format!("{:03}", self.yearday()),
            'p' => if self.hour < 12 { "AM" } else { "PM" }.to_string(),
            'A' => day.to_string(),
            'a' => day[..3].to_string(),
            'B' => month.to_string(),
            'b' | 'h' => month[..3].to_string(),
            'w' => self.weekday().to_string(),
            'u' => ((self.weekday() + 6) % 7 + 1).to_string(),
            'D' => self.format("%m/%d/%y"),
            'F' => self.format("%Y-%m-%d"),
            'T' => self.format("%H:%M:%S"),
            'R' => self.format("%H:%M"),
            'x' => self.format("%m/%d/%y"),
            'X' => self.format("%H:%M:%S"),
            'c' => self.format("%a %b %e %H:%M:%S %Y"),
            'n' => "\n".to_string(),
            't' => "\t".to_string(),
            'z' | 'Z' => String::new(),
            '%' => "%".to_string(),
            _ => return None,
        })
    }
}
