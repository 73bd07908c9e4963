#!lua flags=allow-oom
-- ARGV: session_id, created_us, untouched_for_us. An entry of a later session of that id stays, and so does one that
-- was touched just now: its session may be about to be made.
local size = read_size(ARGV[1])
if size and (size.created_us > tonumber(ARGV[2]) or size.touched_us > clock_us() - tonumber(ARGV[3])) then return 0 end
forget(ARGV[1])
return 1
