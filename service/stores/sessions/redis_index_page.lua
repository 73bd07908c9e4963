#!lua flags=no-writes
-- ARGV: created_us and session_id of the place after which the page begins, both '' for the first; limit.
-- Returns session_id, created_us, session_id, created_us, ... newest first.
local from, limit, names = '+inf', tonumber(ARGV[3]), {}
if ARGV[1] ~= '' then
  from = '(' .. ARGV[1]
  for _, session_id in ipairs(redis.call('ZRANGE', index_key, ARGV[1], ARGV[1], 'BYSCORE', 'REV')) do
    if session_id < ARGV[2] and #names < 2 * limit then
      names[#names + 1] = session_id
      names[#names + 1] = ARGV[1]
    end
  end
end
local rest = limit - #names / 2
if rest > 0 then
  local page = redis.call('ZRANGE', index_key, from, '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, rest, 'WITHSCORES')
  for i = 1, #page, 2 do
    names[#names + 1] = page[i]
    names[#names + 1] = whole(page[i + 1])
  end
end
return names
